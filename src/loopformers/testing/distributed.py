"""Runs a function on several processes over gloo, as a test would."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run_distributed"]


def run_distributed(
    function: Callable[..., Any], *args: Any, world_size: int = 2, folder: Path, start_method: str = "spawn"
) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a gloo process group and return what each rank returned.

    Args:
        function: A function of a module (it is pickled), called within the process group, on one torch thread.
        args: Its further arguments.
        world_size: Processes.
        folder: Where ranks leave their results; a test's tmp_path.
        start_method: How processes are made. `forkserver` is faster where several calls follow each other, and the modules
            they need are named to `multiprocessing.set_forkserver_preload` first.

    Raises:
        torch.multiprocessing.ProcessExitedException: A rank was killed.
        torch.multiprocessing.ProcessRaisedException: A rank raised; its traceback is in the text.
    """
    import torch
    from torch.multiprocessing.spawn import start_processes

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = (function, args, world_size, port, str(folder))
    start_processes(_rank, given, nprocs=world_size, start_method=start_method)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world_size)]


def _rank(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, port: int, folder: str
) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), os.path.join(folder, f"rank-{rank}.pt"))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
