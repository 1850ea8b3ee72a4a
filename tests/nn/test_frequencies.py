from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from loopformers.nn.rope import rotary_tables

FAR = [0, 1, 2, 3, 77, 1023, 4097, 65_537, 99_991]

DIGEST = """
import hashlib, json, torch
from loopformers.nn.conditioning import frequency_embedding
from loopformers.nn.rope import rotary_tables
positions = torch.cat([torch.arange(0, 2000), torch.arange(2000, 100_000, 97)])[None]
digest = hashlib.sha256()
for head_dim, theta in [(2, 100.0), (10, 12345.678), (64, 10000), (128, 5e5)]:
    for dtype in (torch.float32, torch.bfloat16):
        for table in rotary_tables(positions, head_dim=head_dim, theta=theta, table_dtype=dtype, dtype=torch.float32):
            digest.update(table.numpy().tobytes())
for num_loops in (1, 3, 7, 12, 24, 97):
    for scale in (1.0, 0.3, 1000.0):
        digest.update(frequency_embedding(torch.arange(num_loops) / num_loops * scale).numpy().tobytes())
print(json.dumps([torch.backends.cpu.get_cpu_capability(), digest.hexdigest()]))
"""


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 100.0), (6, 1e4), (64, 5e5), (10, 12345.678)])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_the_exact_ones_rounded_once_at_any_distance(head_dim, theta, table_dtype):
    cos, signed_sin = rotary_tables(
        torch.tensor([FAR]), head_dim=head_dim, theta=theta, table_dtype=table_dtype, dtype=torch.float32
    )
    angles = [[p * theta ** (-2 * k / head_dim) for k in range(head_dim // 2)] for p in FAR]
    for table, function in ((cos, math.cos), (signed_sin, math.sin)):
        exact = torch.tensor([[function(angle) for angle in row] for row in angles], dtype=torch.float64)
        assert torch.equal(table[0, 0, :, : head_dim // 2], exact.to(table_dtype).float())
    assert torch.equal(signed_sin[..., : head_dim // 2], -signed_sin[..., head_dim // 2 :])


def test_rows_that_share_their_positions_get_the_tables_of_rows_that_do_not():
    positions = torch.arange(5, 12)[None]
    sizes = {"head_dim": 6, "theta": 1e4, "table_dtype": torch.float32, "dtype": torch.float64}
    shared = rotary_tables(positions.expand(3, -1), **sizes)
    apart = rotary_tables(positions.repeat(3, 1), **sizes)
    for one, other in zip(shared, apart, strict=True):
        assert one.shape == (3, 1, 7, 6)
        assert torch.equal(one, other)


def test_every_instruction_set_of_this_processor_makes_the_same_tables():
    made = {}
    best = torch.backends.cpu.get_cpu_capability()  # torch takes one that the processor lacks, and crashes
    for capability in {"AVX512": ("default", "avx2", "avx512"), "AVX2": ("default", "avx2")}.get(best, ("default",)):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        used, digest = json.loads(done.stdout)
        made[used] = digest
    assert "DEFAULT" in made
    assert len(set(made.values())) == 1, made
