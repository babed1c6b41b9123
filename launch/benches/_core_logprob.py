"""Log-prob and entropy with gradients of both, from logits and fused with the output head, against plain PyTorch.

Memory is the peak of the resident set (``VmHWM``), each figure in a process of its own: inputs, upstream gradients and
the weight-gradient buffer are made and touched, a tiny call loads the code, the kernel's high-water mark is reset, and
one forward and backward pass runs. Peak extra is the mark less what was resident before; it includes the gradients the
pass returns, and what libraries allocate. Times of the two sides alternate in one process, and each side counts with
its fastest pass: whatever else runs on the machine only ever adds.

``python -m launch.benches._core_logprob`` prints the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from launch.bench import table
from launch.measurement import Measurement, Report
from megatron_ext.losses.fused_head import fused_logprob_entropy
from megatron_ext.losses.logprob import token_logprob_entropy

ROWS, VOCAB, HIDDEN = 512, 151_936, 1024
SMALL = (14_336, 2_048)
LOGITS_BYTES = ROWS * VOCAB * 4
Pass = Callable[[], None]


class Case:
    """Tensors of one size, and a forward and backward pass of each way to get both outputs from them."""

    def __init__(self, rows: int, vocab: int, hidden: int | None, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, vocab, (rows,), generator=rng)
        self.upstream = torch.randn(2, rows, generator=rng).unbind(0)
        if hidden is None:
            self.inputs = [torch.empty(rows, vocab).uniform_(-4, 4, generator=rng)]
        else:
            shapes = [(rows, hidden), (vocab, hidden)]
            self.inputs = [torch.empty(shape).uniform_(-0.3, 0.3, generator=rng) for shape in shapes]
            self.buffer = torch.zeros(vocab, hidden)
            self.buffer.fill_(1e-3)  # touched: fresh zero pages are not resident
        for tensor in self.inputs:
            tensor.requires_grad_()

    def _finish(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.autograd.backward(outputs, self.upstream)
        for tensor in self.inputs:
            tensor.grad = None

    def _plain(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logq = torch.log_softmax(logits, dim=-1)
        return logq.gather(1, self.targets.unsqueeze(1)).squeeze(1), -(logq.exp() * logq).sum(-1)

    def plain(self) -> None:
        self._finish(self._plain(self.inputs[0]))

    def ours(self) -> None:
        self._finish(token_logprob_entropy(self.inputs[0], self.targets, temperature=1.0))

    def plain_head(self) -> None:
        hidden, weight = self.inputs
        weight.grad = self.buffer  # autograd adds to it in place
        self._finish(self._plain(hidden @ weight.t()))

    def fused_head(self) -> None:
        hidden, weight = self.inputs
        self._finish(
            fused_logprob_entropy(hidden, weight, self.targets, temperature=1.0, weight_grad=self.buffer),
        )


def _status(field: str) -> int:
    """A memory field of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _peak(case: Case, tiny: Case, name: str) -> float:
    getattr(tiny, name)()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    getattr(case, name)()
    return float(_status("VmHWM") - before)


def _ratio(ours: Pass, plain: Pass, repeats: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for name, run_once in (("plain", plain), ("ours", ours)):
            start = time.perf_counter()
            run_once()
            spent[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in spent.items()}


def _child(what: str) -> dict[str, float]:
    if what == "peak":
        return {"bytes": _peak(Case(ROWS, VOCAB, None), Case(64, 512, None), "ours")}
    if what == "head_peak":
        return {"bytes": _peak(Case(ROWS, VOCAB, HIDDEN), Case(64, 512, 32), "fused_head")}
    if what == "head_time":
        case = Case(ROWS, VOCAB, HIDDEN)
        return _ratio(case.fused_head, case.plain_head, 3)
    rows, vocab = SMALL if what == "small_time" else (ROWS, VOCAB)
    case = Case(rows, vocab, None)
    return _ratio(case.ours, case.plain, 5)


def _measure(what: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "launch.benches._core_logprob", what], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{what} ended with exit status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(report: Report) -> None:
    threads = f"{torch.get_num_threads()} threads"
    size = f"{ROWS} x {VOCAB} fp32"
    head, small = f"{size}, hidden {HIDDEN}", f"{SMALL[0]} x {SMALL[1]} fp32, {threads}"
    peak = _measure("peak")["bytes"] / LOGITS_BYTES
    report(Measurement("logprob_entropy_peak", peak, "x logits", 1.2, "lower", size))
    seconds = _measure("time")
    report(
        Measurement(
            "logprob_entropy_time", seconds["ours"] / seconds["plain"], "x plain", 1.0, "lower", f"{size}, {threads}"
        )
    )
    seconds = _measure("small_time")
    report(
        Measurement("logprob_entropy_small_time", seconds["ours"] / seconds["plain"], "x plain", None, "lower", small)
    )
    peak = _measure("head_peak")["bytes"] / LOGITS_BYTES
    report(Measurement("fused_head_peak", peak, "x logits", 0.15, "lower", head))
    seconds = _measure("head_time")
    report(
        Measurement(
            "fused_head_time", seconds["ours"] / seconds["plain"], "x plain", 1.15, "lower", f"{head}, {threads}"
        )
    )
    report(Measurement("fused_head_seconds", seconds["ours"], "s", None, "lower", f"{head}, {threads}"))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(_child(sys.argv[1])))
    else:
        rows: list[Measurement] = []
        run(rows.append)
        print(table(rows))
