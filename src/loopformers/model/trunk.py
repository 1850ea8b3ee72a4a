"""LoopedModel: embedding, prelude, the looped core, coda, final norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import logging

from loopformers.errors import CacheError, ObjectiveWarning, ScheduleWarning, warn_caller
from loopformers.model.cache import LoopedCache, SlotSource
from loopformers.model.call_arguments import settle_arguments
from loopformers.model.config import LoopConfig
from loopformers.model.inputs import check_mask, check_positions, check_token_values, token_shape
from loopformers.model.outputs import LoopedModelOutput
from loopformers.model.placement import attention_context, place
from loopformers.model.pretrained import LoopedPreTrainedModel
from loopformers.model.untrained import schedule_warning
from loopformers.nn.attention import Attention, AttentionContext, KeyValueSlot, LatentAttention
from loopformers.nn.conditioning import Conditioning
from loopformers.nn.head import VocabularyEmbedding
from loopformers.nn.hooks import with_present_hooks
from loopformers.nn.layer import Layer, Modulation
from loopformers.nn.mlp import MLP
from loopformers.recurrence.injection import INJECTIONS
from loopformers.recurrence.record import LoopRecord
from loopformers.recurrence.slots import Stage
from loopformers.recurrence.stream import STREAMS
from loopformers.recurrence.unroll import Observer, unroll
from loopformers.schedule import Schedule

__all__ = ["LoopedModel", "PreparedInputs", "one_cache"]

logger = logging.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """What every trajectory over the same tokens shares.

    Attributes:
        inputs: The core's inputs: embeddings, or the prelude's output, (batch, seq, dim).
        context: Masks, rotary tables and the attention function.
        positions: Positions of the new tokens, (batch, seq).
        valid: True for text and False for padding, cached tokens included; None: no padding.
    """

    inputs: Tensor
    context: AttentionContext
    positions: Tensor
    valid: Tensor | None


class LoopedModel(LoopedPreTrainedModel):
    """Embedding, prelude, the looped core, coda, final norm.

    With stack L, stream start S, injection I and closing norm C, loop i computes

        x = S(e, h_{i-1});   x = L_n(I_n(x, h_{i-1}); modulation(t_i, Δ_i)) for each layer n;   h_i = C(x)

    Each loop of each run is shown to `observers`, beside the run's own (see `loopformers.analysis.record_loops`).

    Args:
        config: A LoopConfig.
    """

    def __init__(self, config: LoopConfig) -> None:
        from loopformers.model.checkpointed_loop import CheckpointedLoop

        super().__init__(config)
        d = config.hidden_size
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, d, drawn_rows=config.padded_vocab_size)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, d)
        self.prelude = nn.ModuleList(build_layer(config, "prelude", i) for i in range(config.num_prelude_layers))
        self.layers = nn.ModuleList(build_layer(config, "core", i) for i in range(config.num_hidden_layers))
        self.coda = nn.ModuleList(build_layer(config, "coda", i) for i in range(config.num_coda_layers))
        self.stream = STREAMS[config.stream](d, self.loop_start_norm)
        self.injection = INJECTIONS[config.injection](d, self.loop_start_norm)
        if config.conditioning != "none":
            self.conditioning = Conditioning(d, config.num_hidden_layers, config.conditioning, config.time_scale)
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps, elementwise_affine=config.learned_norms != "none")
        self.gradient_checkpointing = False
        self.checkpointed_loop = CheckpointedLoop()
        self.num_kept_loops = 0
        self.observers: list[Observer] = []
        self._noticed_other_loss = False
        self.known_schedules: set[Schedule] = set()  # those that training has drawn here, or that have been warned of
        self.post_init()

    def loop_start_norm(self, x: Tensor) -> Tensor:
        """Norm, without weights, at the start of a loop; the identity in models that chain raw states."""
        return F.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps) if self.config.loop_norm else x

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        schedule: Any = None,
        output_loop_states: bool = False,
        output_residual_norms: bool = False,
        output_loop_diagnostics: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache: LoopedCache | None = None,
        **others: Any,
    ) -> LoopedModelOutput | tuple[Any, ...]:
        """Run the model along one schedule. Arguments are those of `LoopedForCausalLM.forward`."""
        config = self.config
        run_schedule = config.resolve_schedule(num_loops, schedule)
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        cache = self.resolve_cache(one_cache(past_key_values, cache), use_cache, run_schedule)
        position_ids = self.settle(others, input_ids, position_ids, inputs_embeds, cache)
        prepared = self.prepare(
            input_ids, attention_mask, position_ids, inputs_embeds, cache, run_schedule, bool(output_attentions)
        )
        record = LoopRecord(
            run_schedule.num_loops,
            states=output_loop_states or bool(output_hidden_states),
            residual_norms=output_residual_norms,
            diagnostics=output_loop_diagnostics,
        )
        hidden = self.finish(self.run(prepared, run_schedule, cache=cache, observer=record), prepared, cache)
        if cache is not None:
            cache.advance(prepared.positions, prepared.valid)
        if self.training:
            self._notice_other_loss(hidden)
        states = record.states
        output = LoopedModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=(prepared.inputs, *states) if output_hidden_states and states is not None else None,
            attentions=None if prepared.context.weights is None else tuple(prepared.context.weights),
            loop_states=states if output_loop_states else None,
            residual_norms=record.residual_norms,
            loop_diagnostics=record.diagnostics,
        )
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _notice_other_loss(self, hidden: Tensor) -> None:
        """Warn once when a gradient arrives from a loss that is not the configured objective.

        Labels in training mode go another way, so what a backward pass reaches here is the loss of someone else, who has
        only seen the last loop. The forward alone says nothing: nobody may ever train on its result.
        """
        objective = self.config.objective
        if objective == "last_loop" or self._noticed_other_loss or not hidden.requires_grad:
            return

        def warn(gradient: Tensor) -> None:
            if not self._noticed_other_loss:
                self._noticed_other_loss = True
                warn_caller(
                    f"objective={objective!r} is not trained: the loss was computed outside the model, from the last loop of "
                    "one run. To train the objective, call the model with labels and use the loss that it returns; to train "
                    "the last loop on purpose, set config.objective='last_loop'",
                    ObjectiveWarning,
                )

        hidden.register_hook(warn)

    # -- the parts of a forward call, shared by all trajectories over the same tokens ----------------------------

    def settle(
        self,
        others: dict[str, Any],
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: LoopedCache | None,
    ) -> Tensor | None:
        """Return the positions of a call, or refuse an argument of it; see `call_arguments`."""
        if not others:
            return position_ids
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        shape = (0, 0) if tokens is None or tokens.dim() < 2 else (tokens.shape[0], tokens.shape[1])
        return settle_arguments(others, position_ids, shape, 0 if cache is None else cache.get_seq_length())

    def prepare(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: LoopedCache | None,
        schedule: Schedule,
        output_attentions: bool = False,
    ) -> PreparedInputs:
        """Embed, place and mask the new tokens, and run the prelude.

        Raises:
            ConfigError: Ids, embeddings, a mask or positions that are none (`loopformers.model.inputs`), or positions beyond
                the learned ones.
            CacheError: The cache holds another schedule.
        """
        batch_size, num_new = self.check_inputs(input_ids, attention_mask, position_ids, inputs_embeds, cache)
        if not self.training:
            self.warn_where_untrained(schedule)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is not None:
            cache.begin(schedule, batch_size)
        placement = place(
            self.config, attention_mask, position_ids, cache, batch_size=batch_size, num_new=num_new, device=x.device
        )
        if self.config.position_embedding == "learned":
            x = x + self.embed_positions(placement.positions)
        windows = {layer.self_attn.window for layer in (*self.prelude, *self.layers, *self.coda)}
        context = attention_context(
            self.config, placement, cache, windows=windows, dtype=x.dtype, output_attentions=output_attentions
        )
        if len(self.prelude):
            x = self.loop_start_norm(x)
            for i, layer in enumerate(self.prelude):
                x = layer(x, context, slot=None if cache is None else cache.slot("prelude", i))
        return PreparedInputs(x, context, placement.positions, placement.valid)

    def check_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: LoopedCache | None,
    ) -> tuple[int, int]:
        """Check what a call is given (`loopformers.model.inputs`) and return its rows and new tokens."""
        batch_size, num_new = self.token_shape(input_ids, inputs_embeds)
        if input_ids is not None:
            check_token_values(input_ids, self.config.vocab_size)
        if attention_mask is not None:
            num_past = 0 if cache is None else cache.get_seq_length()
            check_mask(attention_mask, batch_size=batch_size, num_past=num_past, num_new=num_new)
        if position_ids is not None:
            check_positions(position_ids, batch_size=batch_size, num_new=num_new)
        return batch_size, num_new

    def token_shape(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        """Check ids or embeddings without a look at their values, and return rows and tokens."""
        dtype = None
        if isinstance(inputs_embeds, Tensor):
            # Autocast and quantised layers take embeddings of other dtypes.
            is_cast = torch.is_autocast_enabled(inputs_embeds.device.type)
            is_cast = is_cast or getattr(self.config, "quantization_config", None) is not None
            dtype = None if is_cast else self.embed_tokens.weight.dtype
        return token_shape(input_ids, inputs_embeds, hidden_size=self.config.hidden_size, dtype=dtype)

    def warn_where_untrained(self, schedule: Schedule) -> None:
        """Warn once, with ScheduleWarning, of a run that training has not drawn: not here, and not by the configuration."""
        if self.config.conditioning == "none" or torch.compiler.is_compiling() or schedule in self.known_schedules:
            return
        self.known_schedules.add(schedule)
        text = schedule_warning(self.config, schedule)
        if text is not None:
            warn_caller(text, ScheduleWarning)

    def run(
        self,
        prepared: PreparedInputs,
        schedule: Schedule,
        *,
        cache: SlotSource | None = None,
        observer: Observer | None = None,
        num_grad_loops: int | None = None,
        start: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the core along a schedule and return the last state, (batch, seq, dim). Arguments as `unroll`'s."""
        modulations = self.modulations(
            schedule, cache if isinstance(cache, LoopedCache) else None, prepared.inputs.device
        )
        step_sizes = schedule.step_sizes

        def loop(
            inputs: Tensor, state: Tensor | None, loop_idx: int, modulation: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            return self.one_loop(
                inputs, state, loop_idx, step_sizes[loop_idx], modulation, prepared.context, cache=cache
            )

        checkpoint = None
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise CacheError(
                    "activation checkpointing runs each loop twice, and a cache would be written twice; call with "
                    "use_cache=False, or turn activation checkpointing off to train a prefix"
                )
            checkpoint = self.checkpointed_loop
            loop = with_present_hooks(self, loop)

        watching = [*self.observers, *([] if observer is None else [observer])]

        def show(loop_idx: int, residual: Tensor, state: Tensor) -> None:
            for watcher in watching:
                watcher(loop_idx, residual, state)

        return unroll(
            loop,
            prepared.inputs,
            schedule.num_loops,
            told=modulations,
            checkpoint=checkpoint,
            num_kept_loops=self.num_kept_loops,
            num_grad_loops=num_grad_loops,
            observer=show,
            start=start,
        )

    def one_loop(
        self,
        inputs: Tensor,
        state: Tensor | None,
        loop_idx: int,
        step_size: float,
        modulation: Tensor | None,
        context: AttentionContext,
        *,
        cache: SlotSource | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one loop, of all tokens or of some.

        Args:
            inputs: The core's inputs, (batch, seq, dim).
            state: State after the previous loop, same shape; None in the first.
            loop_idx: Which loop, from 0: the cache rows to write.
            step_size: Δ of this loop.
            modulation: What conditioning tells this loop, (layers, 4, dim); None: nothing.
            context: Of these tokens.
            cache: Holds the rows.

        Returns:
            The residual stream before the closing norm, and the state.
        """
        x = self.stream(inputs, state, step_size)
        for i, layer in enumerate(self.layers):
            x, signal = (x, None) if state is None else self.injection(i, x, state)
            x = layer(
                x,
                context,
                signal=signal,
                modulation=None if modulation is None else Modulation(*modulation[i]),
                slot=None if cache is None else cache.slot("core", i, loop_idx),
            )
        return x, self.norm(x) if self.config.loop_norm else x

    def enter_loop(
        self,
        inputs: Tensor,
        state: Tensor,
        step_size: float | Tensor,
        modulation: Tensor | None,
        context: AttentionContext,
        slot: KeyValueSlot,
    ) -> None:
        """Write the keys and values of a loop that tokens enter and do not run: the first layer's, which need their state alone.

        Arguments as `one_loop`'s; `slot` is the first layer's row.
        """
        layer: Any = self.layers[0]
        x, _ = self.injection(0, self.stream(inputs, state, step_size), state)
        u = layer.input_layernorm(x)
        if modulation is not None:
            u = u * (1 + Modulation(*modulation[0]).attention_scale)
        layer.self_attn.key_value(u, context, slot)

    def finish(self, state: Tensor, prepared: PreparedInputs, cache: SlotSource | None = None) -> Tensor:
        """Turn a state into a final hidden state: the coda, and the final norm where the loop has not applied it."""
        for i, layer in enumerate(self.coda):
            state = layer(state, prepared.context, slot=None if cache is None else cache.slot("coda", i))
        return state if self.config.loop_norm and not len(self.coda) else self.norm(state)

    def resolve_cache(self, cache: Any, use_cache: bool | None, schedule: Schedule) -> LoopedCache | None:
        """Return the cache of this call: the given one, one that begins with the given prefix, a new one, or none.

        Raises:
            CacheError: A cache of another class that is not a prefix for this model (`LoopedCache.from_prefix`).
        """
        if cache is None:
            wanted = (self.config.use_cache and not self.training) if use_cache is None else use_cache
            if wanted and self.gradient_checkpointing and self.training:
                if use_cache:
                    logger.warning_once("use_cache=True makes no cache under activation checkpointing in training mode")
                return None
            return LoopedCache(self.config) if wanted else None
        if isinstance(cache, LoopedCache):
            return cache
        if isinstance(cache, DynamicCache):
            return LoopedCache.from_prefix(self.config, schedule, cache)
        raise CacheError(
            f"a {type(cache).__name__} has one row for each layer, and a looped model needs one for each loop of each layer; "
            "pass model.new_cache(), or nothing"
        )

    def modulations(self, schedule: Schedule, cache: LoopedCache | None, device: torch.device) -> Tensor | None:
        """Return what conditioning tells each loop of a schedule, (loops, layers, 4, dim), or None where it tells nothing."""
        if self.config.conditioning == "none":
            return None
        if cache is not None and cache.modulations is not None and not torch.is_grad_enabled():
            return cache.modulations
        times = torch.tensor(schedule.times, dtype=torch.float32, device=device)
        step_sizes = torch.tensor(schedule.step_sizes, dtype=torch.float32, device=device)
        modulations = self.conditioning(times, step_sizes)
        if cache is not None and not torch.is_grad_enabled():
            cache.modulations = modulations  # a cache serves one schedule, so every later token reuses them
        return modulations


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache of a call that may name it either way.

    Raises:
        CacheError: Two caches.
    """
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        raise CacheError("past_key_values and cache are two names of one argument, and hold different caches; give one")
    return cache if past_key_values is None else past_key_values


def build_layer(config: LoopConfig, stage: Stage, layer_idx: int) -> Layer:
    """Build one layer of a stage from the configuration."""
    assert config.intermediate_size is not None, "check() has filled it in"
    sizes: dict[str, Any] = {
        "num_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "norm_eps": config.rms_norm_eps,
        "window": config.window(stage, layer_idx),
        "config": config,
    }
    if config.kv_lora_rank is None:
        attention = Attention(config.hidden_size, **sizes)
    else:
        attention = LatentAttention(config.hidden_size, kv_lora_rank=config.kv_lora_rank, **sizes)
    mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
    norm: Callable[[], nn.RMSNorm] = lambda: nn.RMSNorm(  # noqa: E731
        config.hidden_size, eps=config.rms_norm_eps, elementwise_affine=config.learned_norms == "all"
    )
    return Layer(attention, mlp, norm(), norm())
