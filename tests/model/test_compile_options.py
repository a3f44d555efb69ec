"""Options of torch.compile that keep it from timing variants of sums."""

import os
import threading

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

from unsloth_ddp.model.forward.compile_options import (
    BLOCK_COMPILE,
    REPEATABLE,
    layer_options,
    leave_layers_uncompiled,
    uncompiled_layers,
)


def test_this_torch_knows_every_option():
    assert REPEATABLE.items() <= layer_options().items()


@pytest.mark.parametrize("before", [None, "1"])
def test_layers_are_uncompiled_inside_the_block_alone(before, monkeypatch):
    monkeypatch.delenv(BLOCK_COMPILE, raising=False)
    if before:
        monkeypatch.setenv(BLOCK_COMPILE, before)
    with pytest.raises(ValueError, match="inside"), uncompiled_layers():
        assert os.environ[BLOCK_COMPILE] == "0"
        raise ValueError("inside")
    assert os.environ.get(BLOCK_COMPILE) == before


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_layers_of_a_short_run_stay_uncompiled_unless_the_user_says_otherwise(before, after, monkeypatch):
    monkeypatch.setenv(BLOCK_COMPILE, before or "")
    if before is None:
        monkeypatch.delenv(BLOCK_COMPILE)
    leave_layers_uncompiled()
    assert os.environ[BLOCK_COMPILE] == after


@pytest.mark.slow
def test_the_backward_pass_is_compiled_with_them_in_another_thread_too(monkeypatch):
    # Dynamo resets TORCHINDUCTOR_DETERMINISTIC after a compilation, and autograd compiles in its own thread on a GPU.
    seen: list[tuple[str, bool]] = []
    run = GraphLowering.run

    def recorded(graph, *given):
        seen.append((threading.current_thread().name, inductor_config.test_configs.force_filter_reduction_configs))
        return run(graph, *given)

    monkeypatch.setattr(GraphLowering, "run", recorded)
    x = torch.randn(8, 16, requires_grad=True)
    # What an earlier run compiled is not compiled again.
    with fresh_cache():
        compiled = torch.compile(lambda x: (x.exp() / x.sum(1, keepdim=True)).sum(), options=layer_options())
        value = compiled(x)
        thread = threading.Thread(target=value.backward, name="autograd")
        thread.start()
        thread.join()
    assert [name for name, _ in seen][-1] == "autograd"
    assert len(seen) >= 2 and all(filtered for _, filtered in seen)
    assert not inductor_config.test_configs.force_filter_reduction_configs
