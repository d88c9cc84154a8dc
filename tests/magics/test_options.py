"""The options of `%%distributed`: every wrong one names itself, what it takes, and the closest right one."""

from __future__ import annotations

import pytest

from nbdist.magics.options import OptionError, parse, parse_ranks


def test_defaults() -> None:
    options = parse("")
    assert (options.n, options.gpus, options.cpus, options.only, options.output) == (None, None, None, None, "merged")


@pytest.mark.parametrize("line", ["-n 4", "-n4", "-n=4"])
def test_a_number_of_ranks(line: str) -> None:
    assert parse(line).n == 4


def test_all_of_them() -> None:
    options = parse(
        "--cpus 2 --ranks 0,2-3 --return model,losses --output rank0 --fresh --timeout 1.5 --env A=1 --env=B=x=y "
        "--return-limit 1.5GiB"
    )
    assert options.cpus == 2
    assert options.running(4) == (0, 2, 3)
    assert options.only == {"model", "losses"}
    assert options.output == "rank0"
    assert options.fresh
    assert options.timeout == 1.5
    assert options.limit == 3 << 29
    assert [parse(f"--return-limit {size}").limit for size in ("20B", "150kb", "2MB")] == [20, 150_000, 2_000_000]
    assert parse("-n 2").limit == 4 << 30
    assert options.env == {"A": "1", "B": "x=y"}


def test_the_precision_is_a_variable_of_the_cell() -> None:
    assert parse("--mixed-precision BF16 --env A=1").env == {"ACCELERATE_MIXED_PRECISION": "bf16", "A": "1"}
    assert parse("--backend FSDP").env == {"NBDIST_STRATEGY": "fsdp"}
    assert parse("--mixed-precision=no").env == {"ACCELERATE_MIXED_PRECISION": "no"}


def test_no_return_returns_nothing() -> None:
    assert parse("--no-return").only == frozenset()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--gpu 2", "did you mean --gpus"),
        ("--tiemout 3", "did you mean --timeout"),
        ("--frsh", "no such option; did you mean --fresh?"),
        ("--xyz", "There are: -n"),
        ("2", "did you mean -n 2"),
        ("--help", "--timeout: seconds"),
        ("-n", "takes a number of ranks"),
        ("-n zero", "takes a number of ranks"),
        ("-n 0", "1 or more"),
        ("--gpus -1", "one alone: 3, with its comma"),
        ("--gpus 0,0", "GPU 0 is there twice"),
        ("--gpus 0", "GPU 0 alone is `--gpus 0,`"),
        ("--gpus 2 --cpus 2", "exclude each other"),
        ("--env CUDA_VISIBLE_DEVICES=1", "choose with --gpus"),
        ("--output rank1", "did you mean rank0"),
        ("--mixed-precision bf17", "takes one of no, fp16, bf16; did you mean bf16?"),
        ("--mixed-precision fp8", "takes one of no, fp16, bf16"),
        ("--mixed-precision", "takes one of no, fp16, bf16"),
        ("--backend fsdpp", "takes one of ddp, fsdp, hybrid, single, tp; did you mean fsdp?"),
        ("--backend", "takes one of ddp, fsdp, hybrid, single, tp"),
        ("--timeout soon", "takes seconds"),
        ("--timeout -1", "takes seconds"),
        ("--return-limit 5", "like 500MB"),
        ("--return-limit -1GB", "like 500MB"),
        ("--env A", "NAME=VALUE"),
        ("--ranks 3-1", "like 0,2-3"),
        ("--ranks all", "like 0,2-3"),
        ("--return a.b", "names that may come back"),
        ("--return a --no-return", "exclude each other"),
        ("-n 2 --cpus 2", "exclude each other"),
        ("-n 2 -n 3", "given twice"),
        ("--fresh=yes", "takes nothing"),
        ("--env 'A=1", "No closing quotation"),
    ],
)
def test_what_is_wrong_is_said(line: str, says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("(", r"\(")):
        parse(line)


def test_ranks_that_are_not_there() -> None:
    with pytest.raises(OptionError, match="ranks 0 to 1; there is no rank 5"):
        parse_ranks("0,5", 2)
