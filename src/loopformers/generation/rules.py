"""Exit rules: after each loop, which tokens have seen enough.

Add one: write a class with the contract of `ExitRule`, and enter it in `EXIT_RULES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from loopformers.errors import ConfigError, check_count, unknown_name
from loopformers.generation.adaptive import adaptive_forward
from loopformers.generation.depthwise import can_decode_depthwise, decode_depthwise
from loopformers.generation.look import Look
from loopformers.generation.untrained import warn_where_untrained
from loopformers.model.transformers_range import CACHE_NAME

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM
    from loopformers.model.outputs import LoopedCausalLMOutput

__all__ = ["EXIT_RULES", "ArgmaxExit", "EntropyExit", "ExitRule", "KLExit", "StateChangeExit", "parse_exit_rule"]


class ExitRule:
    """Contract: a score of each token after each loop but the last; the token leaves when it is at most the threshold.

    A rule holds nothing of a run: what it must remember of a token is handed back to it after the next loop, so that
    tokens may leave, and rows of a batch move, in between.

    Attributes:
        name: Name in `EXIT_RULES`.
        threshold: Highest score to leave with.
    """

    name: ClassVar[str]
    threshold: float

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Look at the tokens that are still looping.

        Args:
            look: State and, on request, logits of each, after this loop.
            memory: What this method returned after the last loop, of the same tokens; None after the first loop.

        Returns:
            A score of each, (tokens,), infinite where there is nothing to compare with yet; and what to remember of each,
            (tokens, ...).
        """
        raise NotImplementedError

    def run(self, model: LoopedForCausalLM, **inputs: Any) -> LoopedCausalLMOutput:
        """Run a forward call of the model under this rule; the model calls it. See `adaptive_forward`."""
        warn_where_untrained(model, self)
        return adaptive_forward(model, self, **inputs)

    def decode(
        self,
        model: LoopedForCausalLM,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **options: Any,
    ) -> Any:
        """Decode a batch without letting rows wait for deeper ones; None: not in this case. The model calls it.

        Arguments and result are those of transformers' sampling loop. See `decode_depthwise`.
        """
        if not can_decode_depthwise(model, input_ids, generation_config, options):
            return None
        return decode_depthwise(
            model,
            self,
            input_ids,
            schedule=model.config.resolve_schedule(options.get("num_loops"), options.get("schedule")),
            cache=options[CACHE_NAME],
            attention_mask=options.get("attention_mask"),
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
        )

    def __str__(self) -> str:
        return f"{self.name}:{self.threshold:g}"


@dataclass(frozen=True)
class ThresholdExit(ExitRule):
    """A rule whose one setting is its threshold.

    Args:
        threshold: At least 0.

    Raises:
        ConfigError: It is negative, or no number.
    """

    threshold: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not is_number or not self.threshold >= 0:
            raise ConfigError(
                f"threshold={self.threshold!r} of exit rule {self.name!r} must be a number of at least 0, such as 5e-4"
            )

    __str__ = ExitRule.__str__


class KLExit(ThresholdExit):
    """Leave when the prediction has stopped changing: `KL(p_i || p_{i-1}) = Σ_v p_i(v) (ln p_i(v) - ln p_{i-1}(v))` in nats.

    `p_i` is the softmax of loop i's logits. Without training for it, with a threshold of 5e-4: Geiping et al. 2025
    (arXiv 2502.05171), whose recurrent-depth models exit on the divergence of two successive steps.
    """

    name = "kl"

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the divergence from the loop before, and the log-probabilities, (tokens, vocab)."""
        log_p = look.logits.log_softmax(dim=-1)
        if memory is None:
            return never(log_p), log_p
        divergence = (log_p.exp() * (log_p - memory)).sum(dim=-1)
        return divergence.clamp(min=0), log_p  # it is never negative, and a sum of rounded terms may be


class EntropyExit(ThresholdExit):
    """Leave when the uncertainty has stopped changing: `|H_i - H_{i-1}|`, `H_i = -Σ_v p_i(v) ln p_i(v)` in nats.

    Early exit on the entropy itself is the idea of BranchyNet; the change of it needs no level that fits every token.
    """

    name = "entropy"

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the change of entropy, and the entropy, (tokens,)."""
        log_p = look.logits.log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return never(log_p) if memory is None else (entropy - memory).abs(), entropy


class StateChangeExit(ThresholdExit):
    """Leave when the state has stopped moving: `||h_i - h_{i-1}|| / ||h_i||`, L2 norms over the width.

    The relative residual that fixed-point solvers stop at, as in deep equilibrium models. It needs no logits, so it is
    the one rule whose decision costs nothing beside a loop.
    """

    name = "state"

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the relative change, and the state, (tokens, dim)."""
        state = look.state
        if memory is None:
            return never(state), state
        smallest = torch.finfo(state.dtype).tiny
        norm = torch.linalg.vector_norm
        return norm(state - memory, dim=-1) / norm(state, dim=-1).clamp(min=smallest), state


@dataclass(frozen=True)
class ArgmaxExit(ExitRule):
    """Leave when the most likely token has been the same through `patience` further loops.

    The score is minus the number of loops through which it has stayed: the patience of "BERT loses patience" (Zhou et al.
    2020), with loops in the place of layers.

    Args:
        patience: At least 1.

    Raises:
        ConfigError: It is no whole number of at least 1.
    """

    patience: int
    name = "argmax"

    def __post_init__(self) -> None:
        check_count("patience", self.patience)

    @property
    def threshold(self) -> float:  # type: ignore[override]
        """Minus the patience."""
        return -self.patience

    def score(self, look: Look, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return minus the loops that the best token has stayed for, and it and their number, (tokens, 2)."""
        best = look.logits.argmax(dim=-1)
        if memory is None:
            return never(look.logits), torch.stack([best, torch.zeros_like(best)], dim=-1)
        stayed = torch.where(best == memory[:, 0], memory[:, 1] + 1, 0)
        return -stayed, torch.stack([best, stayed], dim=-1)

    def __str__(self) -> str:
        return f"{self.name}:{self.patience}"


def never(like: Tensor) -> Tensor:
    """Return infinite scores, (tokens,), of tokens that there is nothing to compare with yet."""
    return like.new_full((len(like),), math.inf, dtype=torch.float32)


EXIT_RULES: dict[str, type[Any]] = {rule.name: rule for rule in (KLExit, EntropyExit, StateChangeExit, ArgmaxExit)}
"""Rules by name. Each is built from one number."""


def parse_exit_rule(text: str) -> ExitRule:
    """Read a rule as users write it: its name, a colon, and its threshold or patience.

    Raises:
        ConfigError: No such rule, or a number that it cannot have.

    Example:
        >>> parse_exit_rule("kl:5e-4"), str(parse_exit_rule("argmax:2"))
        (KLExit(threshold=0.0005), 'argmax:2')
    """
    name, _, value = text.strip().partition(":") if isinstance(text, str) else (text, "", "")
    if not isinstance(name, str) or name not in EXIT_RULES:
        raise ConfigError(unknown_name("exit rule", name, EXIT_RULES) + "; write for example kl:5e-4")
    try:
        number = int(value) if EXIT_RULES[name] is ArgmaxExit else float(value)
    except ValueError as error:
        example = "argmax:2" if EXIT_RULES[name] is ArgmaxExit else f"{name}:5e-4"
        raise ConfigError(
            f"exit rule {text!r}: {value!r} is no number that it takes; write for example {example}"
        ) from error
    if not math.isfinite(number):
        raise ConfigError(
            f"exit rule {text!r}: a threshold of {value} lets every token leave after the first loop or none; give a finite "
            f"one, such as {name}:5e-4"
        )
    rule: ExitRule = EXIT_RULES[name](number)
    return rule
