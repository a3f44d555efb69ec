"""Options of torch.compile that keep it from timing variants of sums."""

import threading

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

from unsloth_ddp.model.forward.compile_options import REPEATABLE, repeatable_options


def test_this_torch_knows_every_option():
    assert repeatable_options() == REPEATABLE


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
        compiled = torch.compile(lambda x: (x.exp() / x.sum(1, keepdim=True)).sum(), options=repeatable_options())
        value = compiled(x)
        thread = threading.Thread(target=value.backward, name="autograd")
        thread.start()
        thread.join()
    assert [name for name, _ in seen][-1] == "autograd"
    assert len(seen) >= 2 and all(filtered for _, filtered in seen)
    assert not inductor_config.test_configs.force_filter_reduction_configs
