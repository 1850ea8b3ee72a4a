"""LoopedModel and LoopedForCausalLM: the parts put together, with transformers' face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from loopformers.errors import CacheError, CheckpointError, ConfigError
from loopformers.laws import LoopPlan
from loopformers.model.cache import LoopedCache, SlotSource
from loopformers.model.config import LoopConfig
from loopformers.model.saved_schedule import check_saved_schedule
from loopformers.model.transformers_range import CACHE_NAME
from loopformers.nn.attention import Attention, AttentionContext, KeyValueSlot, LatentAttention, attention_reference
from loopformers.nn.conditioning import Conditioning
from loopformers.nn.init import as_role, initialize
from loopformers.nn.layer import Layer, Modulation
from loopformers.nn.mask import attention_mask as build_mask
from loopformers.nn.mask import packed_documents
from loopformers.nn.mlp import MLP
from loopformers.nn.rope import rotary_tables
from loopformers.objectives import OBJECTIVES
from loopformers.objectives.contract import ObjectiveWeights, Prediction, Targets
from loopformers.objectives.cross_entropy import IGNORE
from loopformers.recurrence.injection import INJECTIONS
from loopformers.recurrence.record import LoopDiagnostics, LoopRecord
from loopformers.recurrence.slots import Stage
from loopformers.recurrence.stream import STREAMS
from loopformers.recurrence.unroll import Observer, unroll
from loopformers.schedule import Schedule, check_num_loops

__all__ = ["LoopedCausalLMOutput", "LoopedForCausalLM", "LoopedModel", "LoopedModelOutput"]


@dataclass
class LoopedModelOutput(ModelOutput):
    """Output of LoopedModel.

    Attributes:
        last_hidden_state: After the final norm, (batch, seq, dim).
        cache: The cache, when one is in use.
        hidden_states: The core's inputs and every loop's state, on request.
        attentions: Weights of each layer application, in order, on request.
        loop_states: State after each loop, (batch, seq, dim) each, on request.
        residual_norms: Mean over tokens of the L2 norm of the residual stream before each loop's closing norm, (loops,).
        loop_diagnostics: Residual norms, state cosines and gradient norms by loop, on request.
    """

    last_hidden_state: Tensor | None = None
    cache: LoopedCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    loop_states: tuple[Tensor, ...] | None = None
    residual_norms: Tensor | None = None
    loop_diagnostics: LoopDiagnostics | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """transformers' CausalLMOutputWithPast, and what loops add to it.

    Attributes:
        loop_states: State after each loop, (batch, seq, dim) each, on request.
        residual_norms: Mean over tokens of the L2 norm of the residual stream before each loop's closing norm, (loops,).
        loop_diagnostics: Residual norms, state cosines and gradient norms by loop, on request.
        loss_parts: Terms of the objective by name, scalars without gradient, in training mode.
        exit_loops: Loops that each token got under an exit rule, (batch, seq), 0 for padding.
    """

    loop_states: tuple[Tensor, ...] | None = None
    residual_norms: Tensor | None = None
    loop_diagnostics: LoopDiagnostics | None = None
    loss_parts: dict[str, Tensor] | None = None
    exit_loops: Tensor | None = None


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


class LoopedPreTrainedModel(PreTrainedModel):
    """What both models tell transformers about themselves."""

    config_class = LoopConfig
    config: LoopConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = False
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which here reads safetensors alone, so that no pickle is ever opened.

        Raises:
            CheckpointError: The checkpoint is missing, truncated or foreign, or a tensor's shape does not fit.
            ConfigError: Its configuration, with the overrides among `kwargs`, is not legal.
        """
        source = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        asked = {"use_safetensors": True, **kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = super().from_pretrained(source, *args, **asked)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is no readable checkpoint, perhaps missing or truncated: {error}; give a folder of config.json and "
                "model.safetensors, as save_pretrained writes it, or convert an official one with `loopformers convert`"
            ) from error
        if info["mismatched_keys"] and not may_mismatch:
            name, found, expected = min(info["mismatched_keys"])
            raise CheckpointError(
                f"{source} holds {name} of shape {tuple(found)}, and its configuration asks for {tuple(expected)}; leave "
                "overrides of sizes out, or pass ignore_mismatched_sizes=True to start such tensors anew"
            )
        if {name for name, _ in model.named_parameters() if "layers." in name} <= set(info["missing_keys"]):
            raise CheckpointError(
                f"{source} holds none of the model's layers, but {', '.join(sorted(info['unexpected_keys'])[:3]) or 'nothing'}; "
                "it is of another architecture, or an official file that `loopformers convert` takes"
            )
        return (model, info) if wants_info else model

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the vocabulary, as transformers' method; rows stay padded, and vocab_size counts tokens without padding.

        Args:
            new_num_tokens: Tokens of the new vocabulary; default: as many as now.
            pad_to_multiple_of: New multiple of the rows; default: the configuration's.
            mean_resizing: Whether new rows start near the mean of the old ones, or as the model's initialiser has it.
        """
        config, head = self.config, self.get_output_embeddings()
        tokens = new_num_tokens or config.vocab_size
        multiple = pad_to_multiple_of or config.pad_vocab_size_multiple
        rows = config.padded_vocab_size
        embedding = super().resize_token_embeddings(tokens, multiple, mean_resizing)
        config.vocab_size, config.pad_vocab_size_multiple = tokens, multiple
        if head is not None:
            head = as_role("head", self.get_output_embeddings())  # it may be a new module, made without its role
            if not mean_resizing and not config.tie_word_embeddings:
                torch.nn.init.normal_(head.weight.data[rows:], std=config.head_std)
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        initialize(
            module,
            scheme=config.init_scheme,
            modulation=config.modulation_init,
            std=config.initializer_range,
            num_layers=config.num_hidden_layers,
            head_std=config.head_std,
        )

    def _set_gradient_checkpointing(self, *args: Any, every_n_layers: int = 1, **kwargs: Any) -> None:
        if every_n_layers != 1:
            raise ConfigError(
                f"every_n_layers={every_n_layers}: a looped model checkpoints whole loops, not layers; leave it out"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)


class LoopedModel(LoopedPreTrainedModel):
    """Embedding, prelude, the looped core, coda, final norm.

    With stack L, stream start S, injection I and closing norm C, loop i computes

        x = S(e, h_{i-1});   x = L_n(I_n(x, h_{i-1}); modulation(t_i, Δ_i)) for each layer n;   h_i = C(x)

    Each loop of each run is shown to `observers`, beside the run's own (see `loopformers.analysis.record_loops`).

    Args:
        config: A LoopConfig.
    """

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        config.check()
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, d)
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
        self.num_kept_loops = 0
        self.observers: list[Observer] = []
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
        cache: LoopedCache | None = None,
    ) -> LoopedModelOutput:
        """Run the model along one schedule. Arguments are those of `LoopedForCausalLM.forward`."""
        config = self.config
        run_schedule = config.resolve_schedule(num_loops, schedule)
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        cache = self.resolve_cache(cache if past_key_values is None else past_key_values, use_cache)
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
        states = record.states
        return LoopedModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=(prepared.inputs, *states) if output_hidden_states and states is not None else None,
            attentions=None if prepared.context.weights is None else tuple(prepared.context.weights),
            loop_states=states if output_loop_states else None,
            residual_norms=record.residual_norms,
            loop_diagnostics=record.diagnostics,
        )

    # -- the parts of a forward call, shared by all trajectories over the same tokens ----------------------------

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
            ConfigError: Not exactly one of ids and embeddings, a mask of another length, positions beyond the learned ones.
            CacheError: The cache holds another schedule.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch_size, num_new = x.shape[:2]
        if num_new == 0:
            raise ConfigError("an input of 0 tokens has nothing to predict from; give at least one token")
        if cache is not None:
            cache.begin(schedule, batch_size)
        num_past = 0 if cache is None else cache.get_seq_length()
        valid = self._valid(attention_mask, cache, batch_size, num_past, num_past + num_new)
        if position_ids is None and cache is not None and cache.is_packed and cache.positions is not None:
            # the last document goes on
            position_ids = cache.positions[:, -1:] + torch.arange(1, num_new + 1, device=x.device)
        positions = self._positions(position_ids, valid, batch_size, num_past, num_new, x.device)
        documents = None if position_ids is None else self._documents(positions, valid, cache)
        if self.config.position_embedding == "learned":
            x = x + self.embed_positions(positions)
        context = self._context(x, positions, valid, documents, cache, num_past + num_new, output_attentions)
        if len(self.prelude):
            x = self.loop_start_norm(x)
            for i, layer in enumerate(self.prelude):
                x = layer(x, context, slot=None if cache is None else cache.slot("prelude", i))
        return PreparedInputs(x, context, positions, valid)

    def run(
        self,
        prepared: PreparedInputs,
        schedule: Schedule,
        *,
        cache: LoopedCache | None = None,
        observer: Observer | None = None,
        num_grad_loops: int | None = None,
        start: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the core along a schedule and return the last state, (batch, seq, dim). Arguments as `unroll`'s."""
        modulations = self.modulations(schedule, cache, prepared.inputs.device)
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
                    "a cache under activation checkpointing would be written twice; call with use_cache=False"
                )
            checkpoint = self._gradient_checkpointing_func

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

    def resolve_cache(self, cache: Any, use_cache: bool | None) -> LoopedCache | None:
        """Return the cache of this call: the given one, a new one, or none.

        Raises:
            CacheError: A cache of another class.
        """
        if cache is None:
            wanted = (self.config.use_cache and not self.training) if use_cache is None else use_cache
            return LoopedCache(self.config) if wanted and not (self.gradient_checkpointing and self.training) else None
        if not isinstance(cache, LoopedCache):
            raise CacheError(
                f"a {type(cache).__name__} has one row a layer, and a looped model needs one for each loop of each layer; "
                "pass model.new_cache(), or nothing"
            )
        return cache

    def _valid(
        self, mask: Tensor | None, cache: LoopedCache | None, batch_size: int, num_past: int, num_total: int
    ) -> Tensor | None:
        past = None if cache is None else cache.valid
        if mask is None:
            return None if past is None else F.pad(past, (0, num_total - num_past), value=True)
        if mask.dim() != 2 or len(mask) != batch_size or mask.shape[1] not in (num_total, num_total - num_past):
            raise ConfigError(
                f"attention_mask of shape {tuple(mask.shape)} must be ({batch_size}, {num_total}): one entry for each row and "
                f"each token, {num_past} cached ones included, 1 for text and 0 for padding"
            )
        mask = mask.bool()
        if mask.shape[1] == num_total:
            return mask
        if past is None:
            past = mask.new_ones(batch_size, num_past)
        return torch.cat([past, mask], dim=1)

    def _positions(
        self,
        position_ids: Tensor | None,
        valid: Tensor | None,
        batch_size: int,
        num_past: int,
        num_new: int,
        device: torch.device,
    ) -> Tensor:
        given = position_ids is not None
        if position_ids is None:
            if valid is None:
                position_ids = torch.arange(num_past, num_past + num_new, device=device)[None]
            else:
                position_ids = (valid.long().cumsum(dim=-1) - 1).clamp(min=0)[:, num_past:]
        limit = self.config.max_position_embeddings
        may_exceed = self.config.position_embedding == "learned" and (given or num_past + num_new > limit)
        if may_exceed and int(position_ids.max()) >= limit:
            raise ConfigError(
                f"position {int(position_ids.max())} is beyond the {limit} learned positions of this model; shorten the input "
                f"to {limit} tokens, or train with a larger max_position_embeddings or rotary positions"
            )
        return position_ids.expand(batch_size, num_new)

    def _documents(self, positions: Tensor, valid: Tensor | None, cache: LoopedCache | None) -> Tensor | None:
        """Number the packed documents of all tokens, cached ones included, where given positions tell of several."""
        # A mask of ones, as collators add, says nothing of padding; generate() makes one, and positions from it.
        if valid is None or (cache is None and bool(valid.all())):
            past = None if cache is None else cache.positions
            documents = packed_documents(positions if past is None else torch.cat([past, positions], dim=1))
            if cache is not None:
                cache.is_packed = documents is not None
            return documents
        text = valid[:, -positions.shape[1] :]
        restarts = (positions[:, 1:] != positions[:, :-1] + 1) & text[:, 1:] & text[:, :-1]
        if (cache is not None and cache.is_packed) or (positions.shape[1] > 1 and bool(restarts.any())):
            raise ConfigError(
                "position_ids that restart inside a row pack several documents, and attention_mask says where there is "
                "padding, of which packed rows have none; leave attention_mask out"
            )
        return None

    def _context(
        self,
        x: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        documents: Tensor | None,
        cache: LoopedCache | None,
        num_total: int,
        output_attentions: bool,
    ) -> AttentionContext:
        config = self.config
        implementation = config._attn_implementation or "sdpa"
        if output_attentions and implementation != "eager":
            raise ConfigError(
                f"output_attentions=True with attn_implementation={implementation!r}: only 'eager' returns weights; call "
                "model.set_attn_implementation('eager')"
            )
        function = attention_reference if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        windows = {layer.self_attn.window for layer in (*self.prelude, *self.layers, *self.coda)}
        masks: dict[int | None, Tensor | None]
        if "flash" in implementation and documents is not None:
            raise ConfigError(
                f"attn_implementation={implementation!r} keeps no packed documents apart; call "
                "model.set_attn_implementation('sdpa'), or leave position_ids out"
            )
        if "flash" in implementation:  # flash kernels take the padding and make causality and windows themselves
            masks = dict.fromkeys(windows, None if valid is None or bool(valid.all()) else valid.long())
        else:
            masks = {
                window: build_mask(
                    valid,
                    num_queries=x.shape[1],
                    num_keys=num_total,
                    window=window,
                    device=x.device,
                    documents=documents,
                )
                for window in windows
            }
        context = AttentionContext(function, masks, weights=[] if output_attentions else None)
        if config.position_embedding == "rotary":
            context.rotary = context.key_rotary = self._rotary(positions, x.dtype)
            if config.kv_lora_rank is not None and cache is not None and cache.positions is not None:
                context.key_rotary = self._rotary(torch.cat([cache.positions, positions], dim=1), x.dtype)
        return context

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self.config
        assert config.head_dim is not None
        table_dtype = getattr(torch, config.rope_table_dtype)
        return rotary_tables(
            positions, head_dim=config.head_dim, theta=config.rope_theta, table_dtype=table_dtype, dtype=dtype
        )

    def modulations(self, schedule: Schedule, cache: LoopedCache | None, device: torch.device) -> Tensor | None:
        """Return what conditioning tells each loop of a schedule, (loops, layers, 4, dim), or None where it tells nothing."""
        if self.config.conditioning == "none":
            return None
        if cache is not None and cache.modulations is not None:
            return cache.modulations
        times = torch.tensor(schedule.times, dtype=torch.float32, device=device)
        step_sizes = torch.tensor(schedule.step_sizes, dtype=torch.float32, device=device)
        modulations = self.conditioning(times, step_sizes)
        if cache is not None and not torch.is_grad_enabled():
            cache.modulations = modulations  # a cache serves one schedule, so every later token reuses them
        return modulations


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
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
        self.lm_head = as_role("head", nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False))
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
            use_cache: Whether to cache; default: the configuration's, in evaluation mode.
            num_loops: Budget M; default: the trained T. M uniform steps for a model that knows time, M passes otherwise.
            schedule: A Schedule or anything that `Schedule.parse` reads.
            short_schedule: Short trajectory of shortcut consistency; default: drawn by the configured law.
            num_grad_loops: Loops that keep gradients, counted from the last; default: all (truncated back-propagation).
            targets: As `labels`, but aligned with the logits. Give one of the two.
            num_items_in_batch: Targets that the loss is divided by, of all microbatches of a step; default: this one's.
            logits_to_keep: Compute logits of the last so many positions alone (0: all), or of these indices.
            output_loop_states: Return every loop's state.
            output_residual_norms: Return every loop's mean residual norm.
            output_loop_diagnostics: Return residual norms, state cosines and, after the backward pass, gradient norms.
            output_hidden_states: Return the core's inputs and every loop's state.
            output_attentions: Return attention weights (`eager` alone).
            return_dict: False for a tuple.
            cache: See `past_key_values`.
            cache_position: Unused: the cache knows where it stands. Older transformers pass it.
            exit_rule: Decides after each loop which tokens leave (`loopformers.generation`); the schedule is then the deepest
                run that a token may get. For generation and scoring, without labels.

        Raises:
            ConfigError: Not a legal schedule, mask, input or combination.
            CacheError: The cache holds another schedule, or is of another class.
        """
        if labels is not None and targets is not None:
            raise ConfigError("give labels (not shifted) or targets (aligned with the logits), not both")
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        if targets is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise ConfigError("a loss needs the logits of all positions; call with logits_to_keep=0")
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
            output = exit_rule.run(
                self,
                schedule=self.config.resolve_schedule(num_loops, schedule),
                logits_to_keep=logits_to_keep,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                cache=self.model.resolve_cache(cache if past_key_values is None else past_key_values, use_cache),
            )
        elif targets is not None and self.training:
            long = self.config.resolve_schedule(num_loops, schedule)
            output = self._objective(
                long,
                short_schedule,
                input_ids,
                attention_mask,
                position_ids,
                inputs_embeds,
                self._targets(targets, num_items_in_batch),
                LoopRecord(
                    long.num_loops,
                    states=output_loop_states,
                    residual_norms=output_residual_norms,
                    diagnostics=output_loop_diagnostics,
                ),
                num_grad_loops,
            )
        else:
            if short_schedule is not None:
                raise ConfigError("short_schedule has no meaning without labels in training mode; give schedule")
            if num_grad_loops is not None:
                raise ConfigError("num_grad_loops has no meaning without labels in training mode; leave it out")
            trunk = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                num_loops=num_loops,
                schedule=schedule,
                output_loop_states=output_loop_states,
                output_residual_norms=output_residual_norms,
                output_loop_diagnostics=output_loop_diagnostics,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
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
        return output.to_tuple() if return_dict is False else output

    def head(self, hidden: Tensor) -> Tensor:
        """Map final hidden states (batch, seq, dim) to logits (batch, seq, vocab), in float32 or better, soft-capped."""
        logits = self.lm_head(hidden)[..., : self.config.vocab_size]
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

    def _targets(self, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Targets:
        count = (labels != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return Targets(labels, count, self.head, self.loss_chunk_tokens)

    def _objective(
        self,
        long: Schedule,
        short_schedule: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        targets: Targets,
        record: LoopRecord,
        num_grad_loops: int | None,
    ) -> LoopedCausalLMOutput:
        config = self.config
        if num_grad_loops is not None:
            check_num_loops(num_grad_loops, name="num_grad_loops")
            if config.stream == "state" and num_grad_loops < long.num_loops:
                raise ConfigError(
                    f"num_grad_loops={num_grad_loops} of {long.num_loops} loops with stream='state': only the first loop sees "
                    "the embedding, so it would get no gradient; leave num_grad_loops out, or use a stream that sees the inputs"
                )
        plan = LoopPlan(long, self._short(long, short_schedule))
        num_shared = config.shared_by(plan, num_grad_loops)
        shared: list[Tensor] = []  # the state that the long trajectory hands to the short one
        prepared = self.model.prepare(input_ids, attention_mask, position_ids, inputs_embeds, None, long)

        def predict(state: Tensor) -> Prediction:
            hidden = self.model.finish(state, prepared)
            return Prediction(hidden, self.head(hidden) if self.loss_chunk_tokens is None else None)

        def run(schedule: Schedule, *, first_loop: int | None = None) -> list[Prediction]:
            states: list[Tensor] = []
            start = (num_shared, shared[-1]) if schedule is plan.short and shared else None

            def observe(loop_idx: int, residual: Tensor, state: Tensor) -> None:
                if loop_idx >= (schedule.num_loops - 1 if first_loop is None else first_loop):
                    states.append(state)
                if schedule is plan.long:
                    record(loop_idx, residual, state)
                    if loop_idx == num_shared - 1:
                        shared.append(state)

            if start is not None and num_shared == schedule.num_loops:
                return [predict(shared[-1])]
            self.model.run(prepared, schedule, observer=observe, num_grad_loops=num_grad_loops, start=start)
            return [predict(state) for state in states]

        weights = ObjectiveWeights(config.short_weight, config.consistency_weight, config.consistency_target)
        result = OBJECTIVES[config.objective](run, targets, plan, weights)
        return LoopedCausalLMOutput(
            loss=result.loss,
            logits=result.long.logits,
            loop_states=record.states,
            residual_norms=record.residual_norms,
            loop_diagnostics=record.diagnostics,
            loss_parts=result.parts,
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

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Let generate() run by the schedule that the generation configuration saves, where the call asks for none.

        Raises:
            ConfigError: The model cannot run it.
        """
        prepared, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        asked = {name: kwargs[name] for name in ("num_loops", "schedule") if kwargs.get(name) is not None}
        if not asked:
            saved = getattr(prepared, "schedule", None) or getattr(self.generation_config, "schedule", None)
            asked = {"schedule": check_saved_schedule(saved, self.config)}
        return prepared, model_kwargs | asked

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' greedy and sampling loop, which an exit rule may replace: rows are done with a token at other times."""
        rule: Any = kwargs.get("exit_rule")
        output = None
        if not args and hasattr(rule, "decode"):
            output = rule.decode(self, input_ids, **{name: x for name, x in kwargs.items() if name != "exit_rule"})
        return super()._sample(input_ids, *args, **kwargs) if output is None else output

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give generate() our cache; transformers' own have one row a layer.

        Raises:
            CacheError: Another kind of cache was asked for.
        """
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise CacheError(
                f"cache_implementation={generation_config.cache_implementation!r} has one row a layer, and a looped model needs "
                "one for each loop of each layer; leave cache_implementation out"
            )
        names = ("past_key_values", "cache")
        given = next((cache for name in names if (cache := model_kwargs.pop(name, None)) is not None), None)
        cache = self.model.resolve_cache(given, use_cache=generation_config.use_cache is not False)
        if cache is not None:
            model_kwargs[CACHE_NAME] = cache


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
