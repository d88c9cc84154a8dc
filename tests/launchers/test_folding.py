"""Which lines of N ranks are one: nothing lost, order kept, never a wrong rank."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.launchers import alike, differing, folding, lead_lines
from nbdist.launchers.folding import Folder, Shown

# ------------------------------------------------------------------ what is alike

SAME_BUT_FOR_THE_RANK = [
    ("hello from 0", "hello from 3"),
    ("rank 0 is on cuda:0.", "rank 3 is on cuda:3."),
    ("[0/8] ready", "[3/8] ready"),
    ("[rank: 0] Seed set to 0", "[rank: 3] Seed set to 0"),
    (
        "[rank0]:[W1130 12:25:33.1234567 reducer.cpp:1400] find_unused",
        "[rank3]:[W1130 12:25:34.9 reducer.cpp:1400] find_unused",
    ),
    ("step 3 on rank 0", "step 3 on rank 3"),
    ("device(type='cuda', index=0)", "device(type='cuda', index=3)"),
    ("0: done", "3: done"),
    ("0 | done", "3 | done"),
    ("[0] done", "[3] done"),
    ("  [0]: done", "  [3]: done"),
    ("step 7 (0/8)", "step 7 (3/8)"),
    ("rank 0/8", "rank 3/8"),
    ("LOCAL_RANK=0, global rank: 0", "LOCAL_RANK=3, global rank: 3"),
    ("{'rank': 0, 'loss': 0.5}", "{'rank': 3, 'loss': 0.5}"),
    ("GPU #0 and device_id=0", "GPU #3 and device_id=3"),
    ("worker-0 of 8", "worker-3 of 8"),
    ("Process: 0", "Process: 3"),
    ("hello 0", "hello 3"),
    ("Hello, world! I am 0 of 8", "Hello, world! I am 3 of 8"),
    ("step 5 on 0", "step 5 on 3"),
    ("rank 0 sends to rank 0", "rank 3 sends to rank 0"),
    ("rank 0 using GPU 0, local_rank 0", "rank 3 using GPU 3, local_rank 3"),
]
SAME_BUT_FOR_TIME = [
    ("took 0.31 s", "took 1.2 s"),
    ("took: 40 s", "took: 52.5 s"),
    ("epoch 2 in 1min 30s", "epoch 2 in 1m 50.5s"),
    ("epoch 2 done in 7 ms", "epoch 2 done in 0.4 s"),
    ("loss 0.5, elapsed 0:00:05", "loss 0.5, elapsed 0:00:08"),
    ("step 3 step_time=0.31s", "step 3 step_time=0.2s"),
    ("CPU times: user 1.2 s, sys: 30 ms, total: 1.23 s", "CPU times: user 1.3 s, sys: 9 ms, total: 1.31 s"),
    ("2026-11-30 12:25:33,123 INFO here", "2026-11-30 12:25:34,001 INFO here"),
    ("2026-11-30 23:59:59 INFO here", "2026-12-01 00:00:01 INFO here"),
    ("[12:30:01] here", "[12:30:31] here"),
    ("INFO 11-30 12:30:01 here", "INFO 11-30 12:30:02 here"),
    ("100%|####| 5/5 [00:00<00:00, 98.12it/s]", "100%|####| 5/5 [00:01<00:00,  4.00s/it]"),
    ("0%|    | 0/5 [00:00<?, ?it/s]", "0%|    | 0/5 [00:03<?, ?it/s]"),
    ("5/5 ━━ 1s 12ms/step - loss: 0.5", "5/5 ━━ 2s 14ms/step - loss: 0.5"),
    ("1.25 ms ± 12.3 μs per loop", "1.31 ms ± 9 μs per loop"),
    ("read 3.2 MB/s", "read 3.9 MB/s"),
    ("1,200 tokens/sec", "900 tokens/sec"),
    ("pid 1234 up", "pid 99 up"),
    ("<Foo object at 0x7f12ab34cd56>", "<Foo object at 0x7f12ab34ffff>"),
]
DATA_THAT_LOOKS_LIKE_A_TIME = [
    ("date 2024-01-01", "date 2024-01-02"),
    ("2024-01-01: 5 rows", "2024-01-02: 5 rows"),
    ("until 2024-01-01 10:00:00", "until 2024-01-01 10:00:05"),
    ("2024-01-01 10:00:00 row", "2024-02-01 10:00:00 row"),
    ("2024-99-99 10:00:00 row", "2024-99-99 10:00:01 row"),
    ("timeout=3s", "timeout=30s"),
    ("timeout=3s", "timeout=4s"),
    ("duration of audio: 3 s", "duration of audio: 4 s"),
    ("len 20s", "len 10s"),
    ("score 3h", "score 4h"),
    ("size 7 ms", "size 5 ms"),
    ("waited 0.1s", "waited 9000.0s"),
    ("took 1 s", "took 900 s"),
    ("took 0.31 s", "took 12.9 s"),
    ("epoch 2 in 1min 30s", "epoch 2 in 59m 2.5s"),
    ("read 3.2 MB/s", "read 31 MB/s"),
    ("read 3.2 MB/s", "read 3.2 kB/s"),
    ("wind 3 m/s", "wind 4 m/s"),
    ("start time 3 s", "start time 4 s"),
    ("[12:30:01]", "[12:30:02]"),
    ("12:30:01", "12:30:02"),
    ("clip 00:01:30 to 00:02:00", "clip 00:01:30 to 00:02:10"),
    ("[12:30:01] here", "[12:40:01] here"),
    ("took \0", "took 1 s"),
    ("hash 0xdeadbeef", "hash 0xdeadbeee"),
    ("max 10 min 3", "max 10 min 4"),
]
DIFFERENT = [
    ("loss 0.3", "loss 0.0"),
    ("loss 0.0", "loss 0.3"),
    ("tensor([0.])", "tensor([3.])"),
    ("array([0. 1.])", "array([3. 1.])"),
    ("1e-0", "1e-3"),
    ("x = -0", "x = -3"),
    ("0%", "3%"),
    ("10,003 rows", "10,000 rows"),
    ("0,003 rows", "3,003 rows"),
    ("step 1", "step 3"),
    ("v0", "v3"),
    ("step0 done", "step3 done"),
    ("version 2.0.1", "version 2.3.1"),
    ("max 10 min 3", "max 12 min 3"),
    ("step 5", "step 6"),
    ("x[10:20]", "x[10:30]"),
    ("ratio 3:40", "ratio 3:41"),
    ("hello", "hello world"),
    # what happens to be the rank's number, and is data
    ("errors: 0", "errors: 3"),
    ("errors=0", "errors=3"),
    ("found 0 errors", "found 3 errors"),
    ("step 0", "step 3"),
    ("loss 0", "loss 3"),
    ("0", "3"),
    ("[0]", "[3]"),
    ("[0, 3]", "[3, 3]"),
    ("[0] [3]", "[3] [3]"),
    ("x[0]", "x[3]"),
    ("items [0] ready", "items [3] ready"),
    ("0: 0.5", "3: 0.5"),
    ("[0/100] done", "[3/100] done"),
    ("0/8", "3/8"),
    ("tensor([0], device='cuda:0')", "tensor([3], device='cuda:3')"),
    ("gpus: 0", "gpus: 3"),
    ("num_workers=0", "num_workers=3"),
    ("n_gpu=0", "n_gpu=3"),
    ("num gpu 0", "num gpu 3"),
    ("gpu: 0 GB", "gpu: 3 GB"),
    ("gpu memory 0", "gpu memory 3"),
    ("rank: 0.5", "rank: 3.5"),
    ("device: -0", "device: -3"),
    ("matrix rank 0", "matrix rank 3"),
    ("matrix_rank=0", "matrix_rank=3"),
    ("lora_rank: 0", "lora_rank: 3"),
    ("ranking 0", "ranking 3"),
    ("working on 0", "working on 3"),
    ("resumed from 0", "resumed from 3"),
    ("counting from 0 to 9", "counting from 3 to 9"),
    ("divided by 0", "divided by 3"),
    ("<td>0</td>", "<td>3</td>"),
    ("rank 0: errors 0", "rank 3: errors 3"),
    ("a 0 b 0", "a 3 b 3"),
    ("rank 0: best device 0", "rank 3: best device 3"),
    ("rank 0: device 0", "rank 3: device 3"),
    ("[0] picked worker 0", "[3] picked worker 3"),
    ("best device 0", "best device 3"),
    ("slowest rank 0", "slowest rank 3"),
]


def same(mine: str, theirs: str, rank: int = 3) -> bool:
    forms = (alike.key(theirs), *alike.as_if(alike.key(theirs), rank, 0, 8))
    return alike.key(mine) in forms and alike.near(mine, theirs)


@pytest.mark.parametrize(("mine", "theirs"), SAME_BUT_FOR_THE_RANK + SAME_BUT_FOR_TIME)
def test_same_but_for_rank_or_time(mine: str, theirs: str) -> None:
    assert same(mine, theirs)


@pytest.mark.parametrize(("mine", "theirs"), DIFFERENT + DATA_THAT_LOOKS_LIKE_A_TIME)
def test_a_value_is_no_rank_and_no_time(mine: str, theirs: str) -> None:
    assert not same(mine, theirs)
    assert fold([mine, "after"], *[["other"]] * 2, [theirs, "after"])[0][-1] == f"(3,) {theirs.rstrip()}"


def test_a_straggler_shows_also_among_ranks_that_do_not_lead() -> None:
    shown, folder = fold(["start"], *[[f"took {seconds} s"] for seconds in (1.0, 1.2, 900.0, 1.1, 901.5)])
    assert shown == ["(1, 2, 4) took 1.0 s", "(3, 5) took 900.0 s"] and set(folder.folded) == {2, 4, 5}


UNIT = st.sampled_from(("s", "ms", "h", "min", "m/s", "it/s", "MB/s", "days"))
NOT_ELAPSED = st.text("abegiloqtxz_", min_size=2, max_size=8).filter(lambda word: word not in ("eta",))


@given(NOT_ELAPSED, st.sampled_from((" ", ": ", "=")), UNIT, st.integers(0, 99), st.integers(0, 99))
def test_a_duration_behind_any_other_word_is_data(word: str, joint: str, unit: str, mine: int, theirs: int) -> None:
    rate = unit in ("it/s", "MB/s") and max(mine, theirs) < 2 * min(mine, theirs)
    assert same(f"{word}{joint}{mine} {unit}", f"{word}{joint}{theirs} {unit}") == (mine == theirs or rate)


@given(st.floats(0.01, 1e5), st.floats(0.01, 1e5), st.sampled_from(("took ", "done in ", "after ", "elapsed: ")))
def test_a_duration_is_the_same_within_a_factor_of_two(mine: float, theirs: float, word: str) -> None:
    a, b = round(mine, 3), round(theirs, 3)
    near = abs(a - b) < 1 or max(a, b) < 2 * min(a, b)
    assert same(f"{word}{a} s", f"{word}{b} s") == near == same(f"{word}{b} s", f"{word}{a} s")


def test_another_ranks_number_is_a_difference() -> None:
    assert not same("hello from 0", "hello from 2", rank=3)
    assert same("hello from 0", "hello from 12", rank=12) and not same("hello from 0", "hello from 12", rank=2)
    assert same("hello from 2", "hello from 2", rank=3)


@given(st.text(alphabet="0123456789.,:/-s mit%pdx[]", max_size=80), st.integers(0, 12))
def test_any_line_is_itself(text: str, rank: int) -> None:
    assert same(text, text, rank)
    for form in alike.as_if(text, rank, rank, 8):
        assert form == text


WHO = ("rank {}", "[rank{}]", "cuda:{}", "on worker {}", "local_rank={}", "device_id {}:", "({}/8)", "my process #{}")
LABEL = st.text("abegiloqtxz_", min_size=2, max_size=8)  # of which no word for a rank can be made
SLOT = st.one_of(
    st.sampled_from(WHO).map(lambda who: (who, False)),
    st.tuples(LABEL, st.sampled_from((" {}", ": {}", "={}", " [{}]", " ({})", " #{}", "[{}]"))).map(
        lambda data: ("".join(data), True)
    ),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(SLOT, st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 7), st.data())
def test_a_line_that_differs_in_its_data_is_shown(
    slots: list[tuple[tuple[str, bool], int]], rank: int, data: st.DataObject
) -> None:
    """Its numbers are the rank's own, and the data in it likes to be the rank's number as well."""
    mine = [value if is_data else 0 for (_, is_data), value in slots]
    theirs = [value if is_data else rank for (_, is_data), value in slots]
    at = data.draw(st.integers(0, len(slots) - 1))
    differs = slots[at][0][1]
    if differs:
        mine[at], theirs[at] = data.draw(st.sampled_from([(0, rank), (mine[at], mine[at] + 1), (1, 0)]))
    write = lambda numbers: ", ".join(form.format(n) for ((form, _), _), n in zip(slots, numbers, strict=True))  # noqa: E731
    assert same("now, " + write(mine), "now, " + write(theirs), rank) != differs


def test_a_long_line_is_compared_whole() -> None:
    long = "x" * 5000
    assert same(long, long) and not same(long + "1", long + "2") and len(alike.key(long)) < 100


# ------------------------------------------------------------------ the laws

WORDS = ("a", "rank {r}", "loss 0.{v}", "step {v}", "took {v}.5 s", "cuda:{r} of {v}", "n {r}", "")
STEP = st.tuples(
    st.integers(0, 3), st.sampled_from(WORDS), st.integers(0, 3), st.sampled_from((0.0, 0.0, 0.02, 0.4, 2))
)


def forms(text: str, rank: int) -> set[str]:
    """Everything that this line of this rank may stand for, but for times (the test's own idea of it)."""
    text = re.sub(r"\d+\.5 s", "TIME", text.rstrip())
    found = [match for match in re.finditer(r"(?<=rank |cuda:)\d", text) if match[0] == str(rank)]
    all_forms = set()
    for taken in itertools.product((False, True), repeat=len(found)):
        out, at = "", 0
        for match, take in zip(found, taken, strict=True):
            out += text[at : match.start()] + ("RANK" if take else match[0])
            at = match.end()
        all_forms.add(out + text[at:])
    return all_forms


def stands_for(shown: str, by: int, line: str, rank: int) -> bool:
    a, b = ([float(one) for one in re.findall(r"(\d+\.5) s", text)] for text in (shown, line))
    near = all(one == other or max(one, other) < 2 * min(one, other) for one, other in zip(a, b, strict=False))
    return near and not forms(shown, by).isdisjoint(forms(line, rank))


def play(
    steps: list[tuple[int, str, int, float]], hold_lead: bool, ranks: int
) -> tuple[dict[int, list[str]], list[Shown]]:
    folder = Folder(0, range(ranks), hold_lead)
    written: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    shown: list[Shown] = []
    now = 0.0
    for rank, word, value, pause in steps:
        if rank >= ranks:
            continue
        text = word.format(r=rank, v=value)
        written[rank].append(text)
        folder.add(rank, [text], now)
        shown += folder.ready(now)
        now += pause
        shown += folder.ready(now)
    shown += folder.ready(now, force=True)
    assert not folder.waiting
    return written, shown


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(2, 4))
def test_all_shows_every_line_of_every_rank_in_its_order(steps: list[tuple[int, str, int, float]], ranks: int) -> None:
    written, shown = play(steps, True, ranks)
    for rank, lines in written.items():
        mine = [one for one in shown if rank in one.ranks]
        assert len(mine) == len(lines)
        for one, line in zip(mine, lines, strict=True):
            assert stands_for(one.text, one.ranks[0], line, rank) or any(
                stands_for(one.text, other, line, rank) for other in one.ranks
            )


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(2, 4))
def test_merged_shows_what_the_lead_did_not_write(steps: list[tuple[int, str, int, float]], ranks: int) -> None:
    """Each rank's lines are, in order, those that are shown with its rank and lines of the lead, and nothing else."""
    written, shown = play(steps, False, ranks)
    assert all(0 not in one.ranks for one in shown)
    for rank in range(1, ranks):
        mine = [one for one in shown if rank in one.ranks]
        reached = {0: 0}  # lines shown with this rank: the fewest lines of the lead that it takes
        for line in written[rank]:
            following: dict[int, int] = {}
            for used, at in reached.items():
                if used < len(mine) and any(stands_for(mine[used].text, by, line, rank) for by in mine[used].ranks):
                    following[used + 1] = min(at, following.get(used + 1, at))
                place = next((i for i in range(at, len(written[0])) if stands_for(written[0][i], 0, line, rank)), None)
                if place is not None:
                    following[used] = min(place + 1, following.get(used, place + 1))
            reached = following
        assert len(mine) in reached, (written, shown)


# ------------------------------------------------------------------ alignment


def fold(lead: list[str], *others: list[str], late: bool = False) -> tuple[list[str], Folder]:
    """What is shown beside the lead's lines; the others come first, or after the lead (`late`)."""
    folder = Folder(0, range(len(others) + 1))
    turns = [(0, lead), *enumerate(others, 1)]
    for rank, lines in turns if late else turns[::-1]:
        folder.add(rank, lines, 0.0)
    told = [f"{one.ranks} {one.text}" for one in folder.ready(0.0, force=True)]
    return told, folder


STEPS = [f"step {i} loss {1 / (i + 1):.4f}" for i in range(100)]


@pytest.mark.parametrize("late", [False, True])
def test_equal_output_is_folded(late: bool) -> None:
    shown, folder = fold(STEPS, STEPS, STEPS, late=late)
    assert shown == [] and folder.folded == {}


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_prints_more_goes_on_with_the_lead(late: bool) -> None:
    more = [*STEPS[:10], "extra", *STEPS[10:50], "again", "again", *STEPS[50:], "end"]
    assert fold(STEPS, more, late=late)[0] == ["(1,) extra", "(1,) again", "(1,) again", "(1,) end"]


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_prints_less(late: bool) -> None:
    assert fold(STEPS, [*STEPS[:10], *STEPS[40:]], late=late)[0] == []
    assert fold(STEPS, STEPS[-1:], late=late)[0] == []


def test_one_different_line_does_not_spoil_the_rest() -> None:
    theirs = ["step 50 loss 9.0000" if i == 50 else line for i, line in enumerate(STEPS)]
    assert fold(STEPS, theirs, theirs)[0] == ["(1, 2) step 50 loss 9.0000"]


def test_a_frequent_line_is_no_anchor() -> None:
    """An early `done` is not the last of the lead's: the steps behind it would be shown as if they were not equal."""
    lead = [*STEPS, "done"]
    folder = Folder(0, (0, 1))
    folder.add(0, lead, 0.0)
    folder.add(1, ["done", *STEPS[:20]], 0.0)
    shown = folder.ready(10.0)
    shown += folder.ready(20.0, force=True)
    assert [one.text for one in shown] == ["done"]


def test_lines_of_several_ranks_are_one_with_their_ranks() -> None:
    mine = [[f"worker {rank} ready", "common", f"loss 0.{rank}"] for rank in range(1, 8)]
    shown, folder = fold(["master ready"], *mine)
    every = "(1, 2, 3, 4, 5, 6, 7)"
    assert shown[:2] == [f"{every} worker 1 ready", f"{every} common"]
    assert sorted(shown[-7:]) == [f"({rank},) loss 0.{rank}" for rank in range(1, 8)]
    assert {rank: told.lines for rank, told in folder.folded.items()} == dict.fromkeys(range(2, 8), 1)


def test_what_was_folded_is_counted() -> None:
    _, folder = fold(["rank 0", "took 1 s", "b"], ["rank 1", "took 1.5 s", "b"])
    assert (folder.folded[1].lines, folder.folded[1].why) == (2, {"the rank", "times"})


def test_a_line_waits_for_a_lead_that_is_slower_but_not_for_ever() -> None:
    folder = Folder(0, (0, 1))
    folder.add(1, ["soon"], 0.0)
    assert folder.ready(0.5) == []
    folder.add(0, ["soon"], 0.6)
    assert folder.ready(9.0) == []
    folder.add(1, ["mine"], 10.0)
    assert folder.ready(10.0) == []
    folder.ready(10.0 + folding.BEHIND)
    assert folder.ready(10.01 + folding.BEHIND + differing.SHARED) == [Shown((1,), "mine")]


def test_a_line_of_ten_megabytes_is_compared_and_not_kept() -> None:
    shown, folder = fold(["z" * 10_000_000, "after"], ["z" * 10_000_000, "after"])
    assert shown == [] and folder.held < 1000


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead_lines, "MOST_LINES", 100)
    monkeypatch.setattr(folding, "MOST_WAITING", 50)
    folder = Folder(0, (0, 1))
    shown = []
    for i in range(1000):
        folder.add(0, [f"lead {i} x"], 0.0)
        folder.add(1, [f"mine {i} y"], 0.0)
        shown += folder.ready(0.0)
    assert len(folder._lines) == 100 and sum(map(len, folder._lines._places.values())) == 100
    assert len(folder._others[1].waiting) <= 51
    shown += folder.ready(0.0, force=True)
    assert [one.text for one in shown] == [f"mine {i} y" for i in range(1000)]
