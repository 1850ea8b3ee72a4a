"""Ceilings: sizes beyond which a number is a mistake or an attack, and never a model, a run or a text.

Each notion has one constant, far above what anybody has trained and far below what would fill memory or time with nothing
but counting. Whether a legal size fits this machine is another question, which `model.memory_check` answers.
"""

from __future__ import annotations

__all__ = [
    "MAX_BATCH",
    "MAX_BUDGETS",
    "MAX_CELLS",
    "MAX_COUNT",
    "MAX_HEADS",
    "MAX_LAYERS",
    "MAX_LOOPS",
    "MAX_ROW",
    "MAX_SEED",
    "MAX_SEQ_LEN",
    "MAX_STEPS",
    "MAX_TASK_SIZE",
    "MAX_VOCABULARY",
    "MAX_WIDTH",
]

MAX_LOOPS = 4096
"""Loops of a run."""

MAX_LAYERS = 4096
"""Layers of a stack."""

MAX_WIDTH = 2**20
"""Width of the residual stream, an MLP, a head or a latent."""

MAX_HEADS = 2**16
"""Heads of a layer."""

MAX_VOCABULARY = 2**31 - 1
"""Tokens of a vocabulary: what 32-bit ids can name."""

MAX_SEQ_LEN = 2**31 - 1
"""Tokens of a sequence, a context or a window."""

MAX_COUNT = 2**31 - 1
"""Of whatever has no ceiling of its own: tensors and files count no further everywhere."""

MAX_BATCH = 2**24
"""Sequences at a time, beams, windows that are scored, and questions."""

MAX_STEPS = 10**9
"""Updates of a run."""

MAX_SEED = 2**32 - 1
"""Largest seed: NumPy's generators, which libraries seed beside torch's, take no larger one."""

MAX_BUDGETS = 1024
"""Budgets that are scored in one go."""

MAX_CELLS = 4096
"""Cells of a grid. Each is a training run, and all are checked before the first starts."""

MAX_TASK_SIZE = 2**16
"""Symbols, digits, operations and questions of a synthetic task."""

MAX_ROW = 2**16
"""Tokens of a row of a synthetic task: hundreds of rows are made at a time."""
