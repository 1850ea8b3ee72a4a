"""LoopedForCausalLM: the trunk with a head, objectives and transformers' face."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformers.errors import CacheError, ConfigError
from loopformers.laws import LoopPlan
from loopformers.model.cache import LoopedCache, ReadOnlyRows, SlotSource
from loopformers.model.config import LoopConfig
from loopformers.model.generation import LoopedGenerationMixin
from loopformers.model.inputs import check_logits_to_keep, check_num_items, check_targets
from loopformers.model.outputs import LoopedCausalLMOutput
from loopformers.model.pretrained import LoopedPreTrainedModel
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.model.trunk import LoopedModel, one_cache
from loopformers.nn.head import VocabularyHead
from loopformers.objectives import OBJECTIVES
from loopformers.objectives.contract import ObjectiveWeights, Prediction, Targets, check_smoothing
from loopformers.objectives.cross_entropy import IGNORE
from loopformers.recurrence.record import LoopRecord
from loopformers.schedule import Schedule, check_num_loops

__all__ = ["LoopedForCausalLM"]


class ExitRunner(Protocol):
    """How the model sees an exit rule (`loopformers.generation`): something that runs a forward call in its place."""

    def run(
        self, model: LoopedForCausalLM, *, schedule: Schedule, logits_to_keep: int | Tensor, **inputs: Any
    ) -> LoopedCausalLMOutput:
        """Run the model until each token leaves. `inputs`: ids, mask, positions, embeddings and cache of `forward`."""
        ...

    def decode(self, model: LoopedForCausalLM, input_ids: Tensor, **options: Any) -> Any:
        """Do what transformers' sampling loop does with these arguments, or return None to leave it to that loop."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call wants to know of its loops beside the loss. Arguments are those of `LoopedForCausalLM.forward`."""

    loop_states: bool
    residual_norms: bool
    diagnostics: bool
    hidden_states: bool
    attentions: bool

    def record(self, num_loops: int) -> LoopRecord:
        """Return what watches the run."""
        return LoopRecord(
            num_loops,
            states=self.loop_states or self.hidden_states,
            residual_norms=self.residual_norms,
            diagnostics=self.diagnostics,
        )


class LoopedForCausalLM(LoopedPreTrainedModel, LoopedGenerationMixin):
    """A looped language model.

    Two attributes trade memory for time in training and change no number: with `loss_chunk_tokens` set, the loss makes
    the logits of so many tokens at a time (and `logits` of the output is None); under activation checkpointing the
    last `model.num_kept_loops` loops keep their activations all the same.

    Args:
        config: A LoopConfig.

    Example:
        >>> import torch
        >>> from loopformers import LoopConfig, LoopedForCausalLM
        >>> config = LoopConfig.from_preset("loopformer", hidden_size=64, num_hidden_layers=2, num_loops=4, vocab_size=97)
        >>> model = LoopedForCausalLM(config).eval()
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> model(ids, schedule="coarse-first:2").logits.shape
        torch.Size([1, 3, 97])
        >>> model.generate(ids, num_loops=2, max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 5])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.model = LoopedModel(config)
        self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, drawn_rows=config.padded_vocab_size)
        self.loss_chunk_tokens: int | None = None
        self._draw = (0, 0)
        self.post_init()
        self.tie_weights()  # older transformers leave a model on the meta device untied

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        schedule: Any = None,
        short_schedule: Any = None,
        num_grad_loops: int | None = None,
        targets: Tensor | None = None,
        smoothing: float = 0.0,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        output_loop_states: bool = False,
        output_residual_norms: bool = False,
        output_loop_diagnostics: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache: LoopedCache | None = None,
        cache_position: Tensor | None = None,
        exit_rule: ExitRunner | None = None,
        **others: Any,
    ) -> LoopedCausalLMOutput | tuple[Any, ...]:
        """Run the model along a schedule, and compute the loss where labels are given.

        Args:
            input_ids: Tokens, (batch, seq); only the new ones where a cache is given.
            attention_mask: 1 for text and 0 for padding, (batch, cached + seq).
            position_ids: Positions of the tokens, (batch, seq); default: counted from each row's first text token. Where one
                does not follow the last, another document begins, and no token sees another document's.
            past_key_values: A cache of the same schedule, see `new_cache`; `cache` is its name in newer transformers.
            inputs_embeds: Embeddings in place of tokens, (batch, seq, dim).
            labels: Tokens to predict, (batch, seq), not shifted, -100 where there is none. In training mode they give the
                configured objective, in evaluation mode the cross entropy of this run.
            use_cache: Whether to cache; default: the configuration's, in evaluation mode. With labels in training mode a cache
                serves the long trajectory, and one that holds tokens is refused where the objective trains another one.
            num_loops: Budget M; default: the trained T. M uniform steps for a model that knows time, M passes otherwise.
            schedule: A Schedule or anything that `Schedule.parse` reads.
            short_schedule: Short trajectory of shortcut consistency; default: drawn by the configured law.
            num_grad_loops: Loops that keep gradients, counted from the last; default: all (truncated back-propagation).
            targets: As `labels`, but aligned with the logits. Give one of the two.
            smoothing: Label smoothing, from 0 to below 1: share of each target's probability that is spread evenly over the
                vocabulary, in each cross entropy of the objective. For labels in training mode. (transformers takes any
                argument with "label" in its name for labels.)
            num_items_in_batch: Targets that the loss is divided by, of all microbatches of a step; default: this one's.
            logits_to_keep: Compute logits of the last so many positions alone (0: all), or of these indices.
            output_loop_states: Return every loop's state.
            output_residual_norms: Return every loop's mean residual norm.
            output_loop_diagnostics: Return residual norms, state cosines and, after the backward pass, gradient norms.
            output_hidden_states: Return the core's inputs and every loop's state.
            output_attentions: Return attention weights (`eager` alone).
            return_dict: False for a tuple; default: the configuration's.
            cache: See `past_key_values`.
            cache_position: Unused: the cache knows where it stands. Older transformers pass it.
            exit_rule: Decides after each loop which tokens leave (`loopformers.generation`); the schedule is then the deepest
                run that a token may get. For generation and scoring, without labels.
            others: What transformers passes to any model: `shift_labels` (as `targets`, in place of labels); `cu_seq_lens_q`,
                `max_length_q`, `seq_idx` and their kin, which say where packed documents begin. All else is refused.

        Raises:
            ConfigError: Not a legal schedule, mask, input or combination (`loopformers.model.inputs`).
            CacheError: The cache holds another schedule, or is of another class.
        """
        cache = one_cache(past_key_values, cache)
        if (shifted := others.pop("shift_labels", None)) is not None:
            labels, targets = None, shifted
        targets = self._checked(input_ids, inputs_embeds, labels, targets, logits_to_keep)
        if targets is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise ConfigError("a loss needs the logits of all positions; call with logits_to_keep=0")
        position_ids = self.model.settle(others, input_ids, position_ids, inputs_embeds, cache)
        if exit_rule is not None:
            if not hasattr(exit_rule, "run"):
                raise ConfigError(
                    f"exit_rule={exit_rule!r} is no exit rule; make one with loopformers.generation.parse_exit_rule, such as "
                    "parse_exit_rule('kl:5e-4')"
                )
            if targets is not None or any(
                (
                    output_loop_states,
                    output_residual_norms,
                    output_loop_diagnostics,
                    output_hidden_states,
                    output_attentions,
                )
            ):
                raise ConfigError(
                    "exit_rule with labels or with states, norms or attentions of every loop: tokens that leave have none; leave "
                    "these out, and measure losses with loopformers.evaluation.exit.measure_exit"
                )
            deepest = self.config.resolve_schedule(num_loops, schedule)
            self._refuse_objective_arguments(short_schedule, num_grad_loops)
            self.model.token_shape(input_ids, inputs_embeds)  # before a rule cuts them into chunks
            output = exit_rule.run(
                self,
                schedule=deepest,
                logits_to_keep=logits_to_keep,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                cache=self.model.resolve_cache(cache, use_cache, deepest),
            )
        elif targets is not None and self.training:
            config = self.config
            long = config.resolve_schedule(num_loops, schedule)
            output = self._objective(
                long,
                short_schedule,
                num_grad_loops,
                self._targets(targets, num_items_in_batch, smoothing),
                Asked(
                    loop_states=output_loop_states,
                    residual_norms=output_residual_norms,
                    diagnostics=output_loop_diagnostics,
                    hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
                    attentions=config.output_attentions if output_attentions is None else output_attentions,
                ),
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                cache=self.model.resolve_cache(cache, use_cache, long),
                is_prefix=cache is not None and not isinstance(cache, LoopedCache),
            )
        else:
            self._refuse_objective_arguments(short_schedule, num_grad_loops)
            if num_items_in_batch is not None and targets is None and self.training:
                self._refuse_kept_labels()
            if smoothing:
                raise ConfigError("smoothing has no meaning without labels in training mode; leave it out")
            trunk = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                num_loops=num_loops,
                schedule=schedule,
                output_loop_states=output_loop_states,
                output_residual_norms=output_residual_norms,
                output_loop_diagnostics=output_loop_diagnostics,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                return_dict=True,
                cache=cache,
            )
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
            logits = self.head(
                trunk.last_hidden_state[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept]
            )
            loss = None
            if targets is not None:
                whole = Prediction(trunk.last_hidden_state, logits)
                loss = self._targets(targets, num_items_in_batch).cross_entropy(whole)
            output = LoopedCausalLMOutput(
                loss=loss,
                logits=logits,
                hidden_states=trunk.hidden_states,
                attentions=trunk.attentions,
                loop_states=trunk.loop_states,
                residual_norms=trunk.residual_norms,
                loop_diagnostics=trunk.loop_diagnostics,
                **{CACHE_NAME: trunk.cache},
            )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def head(self, hidden: Tensor) -> Tensor:
        """Map final hidden states (batch, seq, dim) to logits (batch, seq, vocab), in float32 or better, soft-capped."""
        logits = self.lm_head(hidden)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        cap = self.config.final_logit_softcapping
        if cap is None:
            return logits
        scaled = logits / cap
        # The same numbers either way; where no graph is kept, two tensors of the size of the logits are saved.
        return cap * torch.tanh(scaled) if scaled.requires_grad else scaled.tanh_().mul_(cap)

    def new_cache(self) -> LoopedCache:
        """Return an empty cache; its first call fixes its schedule."""
        return LoopedCache(self.config)

    def set_draw(self, step: int, microbatch: int = 0) -> None:
        """Say which draw of the law the next objective uses.

        A trainer calls it before each microbatch, so that a draw depends on (seed, step, microbatch) alone: the same on
        every rank and after every resume. Without it draws are numbered by the calls since construction.
        """
        self._draw = (step, microbatch)

    def _checked(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        labels: Tensor | None,
        targets: Tensor | None,
        logits_to_keep: int | Tensor,
    ) -> Tensor | None:
        """Check what the trunk does not see, and return the targets of labels or of targets."""
        if labels is None and targets is None and type(logits_to_keep) is int and logits_to_keep >= 0:
            return None  # every step of decoding; the trunk checks tokens
        _, num_new = shape = self.model.token_shape(input_ids, inputs_embeds)
        check_logits_to_keep(logits_to_keep, num_new=num_new)
        if labels is not None and targets is not None:
            raise ConfigError("give labels (not shifted) or targets (aligned with the logits), not both")
        if labels is not None:
            check_targets("labels", labels, shape=shape, vocab_size=self.config.vocab_size)
            return F.pad(labels[:, 1:].long(), (0, 1), value=IGNORE)
        if targets is not None:
            check_targets("targets", targets, shape=shape, vocab_size=self.config.vocab_size)
            return targets.long()
        return None

    def _targets(self, labels: Tensor, num_items_in_batch: Tensor | int | None, smoothing: float = 0.0) -> Targets:
        check_smoothing(smoothing)
        count = (labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        return Targets(labels, check_num_items(count), self.head, self.loss_chunk_tokens, smoothing)

    def _refuse_kept_labels(self) -> None:
        """Refuse a count of targets that comes without them: transformers' Trainer keeps labels for a loss of its own."""
        if self.config.objective != "last_loop":
            raise ConfigError(
                f"num_items_in_batch without labels: the trainer keeps them for a loss of its own (label_smoothing_factor or "
                f"compute_loss_func), and objective={self.config.objective!r} would not be trained; use LoopTrainer, which "
                "smooths labels inside the objective, or set config.objective='last_loop' to train the last loop only"
            )

    def _refuse_objective_arguments(self, short_schedule: Any, num_grad_loops: int | None) -> None:
        if short_schedule is not None:
            raise ConfigError("short_schedule has no meaning without labels in training mode; give schedule")
        if num_grad_loops is not None:
            raise ConfigError("num_grad_loops has no meaning without labels in training mode; leave it out")

    def _objective(
        self,
        long: Schedule,
        short_schedule: Any,
        num_grad_loops: int | None,
        targets: Targets,
        asked: Asked,
        *,
        cache: LoopedCache | None,
        is_prefix: bool,
        **inputs: Tensor | None,
    ) -> LoopedCausalLMOutput:
        """Compute the configured objective. What was asked for is told of the long trajectory, which also has the cache."""
        config = self.config
        if num_grad_loops is not None:
            check_num_loops(num_grad_loops, name="num_grad_loops")
            if config.stream == "state" and num_grad_loops < long.num_loops:
                raise ConfigError(
                    f"num_grad_loops={num_grad_loops} of {long.num_loops} loops with stream='state': only the first loop sees "
                    "the embedding, so it would get no gradient; leave num_grad_loops out, or use a stream that sees the inputs"
                )
        plan = LoopPlan(long, self._short(long, short_schedule))
        if cache is not None and not is_prefix:
            self._check_context(cache, plan)
        num_shared = config.shared_by(plan, num_grad_loops)
        shared: list[Tensor] = []  # the state that the long trajectory hands to the short one
        record = asked.record(long.num_loops)
        prepared = self.model.prepare(**inputs, cache=cache, schedule=long, output_attentions=asked.attentions)
        unseen = replace(prepared, context=replace(prepared.context, weights=None))  # whose attentions nobody asked for
        self.model.known_schedules.update((long,) if plan.short is None else (long, plan.short))
        # A prefix is read by every run and written by none; a cache goes with the long trajectory, which adds its tokens.
        prefix = None if cache is None or not is_prefix else ReadOnlyRows(cache)

        def rows(*, of_long: bool) -> SlotSource | None:
            return prefix or (cache if of_long else None)

        def predict(state: Tensor, is_last: bool) -> Prediction:
            hidden = self.model.finish(state, prepared if is_last else unseen, rows(of_long=is_last))
            return Prediction(hidden, self.head(hidden) if self.loss_chunk_tokens is None else None)

        def run(schedule: Schedule, *, first_loop: int | None = None) -> list[Prediction]:
            states: list[Tensor] = []
            is_long = schedule is plan.long
            start = (num_shared, shared[-1]) if schedule is plan.short and shared else None

            def observe(loop_idx: int, residual: Tensor, state: Tensor) -> None:
                if loop_idx >= (schedule.num_loops - 1 if first_loop is None else first_loop):
                    states.append(state)
                if is_long:
                    record(loop_idx, residual, state)
                    if loop_idx == num_shared - 1:
                        shared.append(state)

            if start is not None and num_shared == schedule.num_loops:
                return [predict(shared[-1], is_last=False)]
            self.model.run(
                prepared if is_long else unseen,
                schedule,
                cache=rows(of_long=is_long),
                observer=observe,
                num_grad_loops=num_grad_loops,
                start=start,
            )
            return [predict(state, is_last=is_long and state is states[-1]) for state in states]

        weights = ObjectiveWeights(config.short_weight, config.consistency_weight, config.consistency_target)
        result = OBJECTIVES[config.objective](run, targets, plan, weights)
        if cache is not None and not is_prefix:
            cache.advance(prepared.positions, prepared.valid)
        states = record.states or ()
        return LoopedCausalLMOutput(
            loss=result.loss,
            logits=result.long.logits,
            hidden_states=(prepared.inputs, *states) if asked.hidden_states else None,
            attentions=None if prepared.context.weights is None else tuple(prepared.context.weights),
            loop_states=record.states if asked.loop_states else None,
            residual_norms=record.residual_norms,
            loop_diagnostics=record.diagnostics,
            loss_parts=result.parts,
            **{CACHE_NAME: None if is_prefix else cache},
        )

    def _check_context(self, cache: LoopedCache, plan: LoopPlan) -> None:
        """Refuse a context that only one of an objective's predictions could see.

        Raises:
            CacheError: The cache holds tokens, and the objective predicts from more than the run that it serves.
        """
        if not cache.get_seq_length():
            return
        other = None
        if plan.short is not None:
            other = f"a short trajectory ({plan.short})"
        elif len(self.model.coda) and self.config.objective in ("every_loop", "last_third"):
            other = "a coda after earlier loops"
        if other is not None:
            raise CacheError(
                f"a cache of {cache.get_seq_length()} tokens with labels in training mode: objective="
                f"{self.config.objective!r} also trains {other}, which needs rows of its own for these tokens; give all tokens "
                "without a cache, or call in evaluation mode"
            )

    def _short(self, long: Schedule, given: Any) -> Schedule | None:
        config = self.config
        if config.objective != "shortcut_consistency":
            if given is not None:
                raise ConfigError(
                    f"objective={config.objective!r} trains no short trajectory; leave short_schedule out"
                )
            return None
        if given is not None:
            return config.resolve_schedule(schedule=given)
        step, microbatch = self._draw
        self._draw = (step, microbatch + 1)
        if long.num_loops < 2:
            return None
        return config.short_law(long.num_loops).plan(seed=config.loop_seed, step=step, microbatch=microbatch).short
