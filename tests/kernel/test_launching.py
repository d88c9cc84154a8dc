"""`notebook_launcher` and `debug_launcher` from a notebook."""

from __future__ import annotations

import time

import pytest

from tests.kernel.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]


def test_nb1_nb4_training_of_the_notebooks_own_model(nb: Notebook) -> None:
    """NB1 and NB4: after an Accelerator, a pretended CUDA, OpenMP and threads, from a decorated closure."""
    nb.ok(
        "import threading, time, torch\nfrom torch import nn\n"
        "from nbdist import Accelerator, debug_launcher, notebook_launcher\n"
        "accelerator = Accelerator()\ntorch.cuda.is_initialized = lambda: True\n"
        "threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "product = torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "state = {'n': 0}; model = nn.Linear(1, 1); before = model.weight.item(); alias = model.weight"
    )
    cell = nb.ok(
        "def make(step):\n"
        "    @torch.no_grad()\n"
        "    def train(state):\n"
        "        global r\n"
        "        accelerator = Accelerator()\n"
        "        state['n'] += step\n"
        "        model.weight.add_(step)\n"
        "        r = accelerator.process_index\n"
        "        accelerator.print(accelerator.num_processes, 'processes')\n"
        "        return r\n"
        "    return train\n"
        "values = notebook_launcher(make(1), (state,), num_processes=2)"
    )
    assert cell.stdout.splitlines()[-1] == "2 processes"
    assert nb.value("(state, round(model.weight.item() - before, 5), alias is model.weight)") == ({"n": 1}, 1.0, True)
    assert nb.value("(r, list(values))") == (0, [0, 1])


def test_nothing_returned_is_nothing_shown(nb: Notebook) -> None:
    assert nb.ok("from nbdist import notebook_launcher\nnotebook_launcher(lambda: None, num_processes=2)").results == []


def test_plots_and_sources_are_as_in_a_cell(nb: Notebook) -> None:
    cell = nb.ok(
        "from nbdist import debug_launcher\nimport inspect\n"
        "def plot():\n"
        "    import matplotlib.pyplot as plt\n"
        "    plt.plot([1, 2])\n"
        "    plt.show()\n"
        "    return inspect.getsource(plot).splitlines()[0]\n"
        "debug_launcher(plot)"
    )
    assert [data for data in cell.data if "image/png" in data]
    assert cell.results[0]["text/plain"] == "[0: 'def plot():', 1: 'def plot():']"


def test_a_name_that_could_not_be_sent_is_explained(nb: Notebook) -> None:
    nb.ok("import threading\nfrom nbdist import debug_launcher\nlock = threading.Lock()")
    nb.ok("def uses():\n    return lock.locked()")
    cell = nb.run("debug_launcher(uses)")
    assert cell.error is not None and cell.error[0] == "NameError"
    assert cell.error[1].startswith("name 'lock' is not defined: 'lock' is here, but it could not be sent: TypeError")


def test_a_wrong_call_is_shown_without_our_frames(nb: Notebook) -> None:
    cell = nb.run("from nbdist import notebook_launcher\nnotebook_launcher(len, 3)")
    assert cell.error is not None and cell.error[0] == "TypeError" and "launchers" not in cell.traceback


def test_stop_in_a_second_attempt_and_no_third(nb: Notebook) -> None:
    nb.ok(
        "import time\nfrom nbdist import notebook_launcher\ndef work():\n    import os\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n        raise OSError\n"
        "    print('second')\n    time.sleep(60)\n"
    )
    start = time.monotonic()
    cell = nb.run("notebook_launcher(work, (), 2, max_restarts=5)", stop_when=lambda cell: "second" in cell.stdout)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt" and "restart 2" not in cell.stderr
    assert time.monotonic() - start < 30
