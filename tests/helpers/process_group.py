"""A group of one process, as trainers open it, that ends before the test does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def process_group() -> Iterator[None]:
    """Opens a group of this process alone, and fails if something holds it afterwards: a model in DDP, torch's caches.

    A group that lives on is ended with the process, or by a process that another thread forks, and waits there for
    threads of Gloo that are gone.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = weakref.ref(torch.distributed.group.WORLD)
    try:
        yield
    finally:
        _clear_sharding_prop_cache()  # of sharded tensors
        gc.collect()
        torch.distributed.destroy_process_group()
    assert group() is None
