"""Functions that torch.compile compiles after the first steps are counted."""

from __future__ import annotations

import torch

from unsloth_ddp.training.callbacks import WARM_UP_STEPS, CountCompilations


def test_only_what_is_compiled_after_the_first_steps_counts() -> None:
    torch._dynamo.reset()
    counted = CountCompilations()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for _ in range(WARM_UP_STEPS):
        assert counted.after_warm_up is None
        double(torch.ones(3))
        counted.on_step_end(None, None, None)
    assert counted.after_warm_up == 0
    double(torch.ones(3))
    assert counted.after_warm_up == 0
    for size in (4, 5):
        double(torch.ones(size))
        counted.on_step_end(None, None, None)
    assert counted.after_warm_up == 2
    torch._dynamo.reset()
