"""Trains one system of the quickstart, scores it, and leaves a folder that `from_pretrained` reads."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from loopformers.analysis.stability import assess_stability
from loopformers.data.corpora import load_splits
from loopformers.data.packing import pack_documents
from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.evaluation.budget import evaluate_budgets
from loopformers.files import writing
from loopformers.model.config import LoopConfig
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.model.quiet import quiet_transformers
from loopformers.model.tokenizer import continuation_text, encode_prompt
from loopformers.studies.quickstart import RESULT_FILE, QuickstartSettings, SystemResult, system_folder, write_json
from loopformers.studies.workers import Emit
from loopformers.training.checkpoints import remove_all
from loopformers.training.optimizers import MuonAdamW
from loopformers.training.run_text import RunText, packed_text
from loopformers.training.step_log import METRICS_FILE, StepLog
from loopformers.training.trainer import LoopTrainer, training_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["train_system"]


def train_system(
    system: str,
    settings: QuickstartSettings,
    folder: Path,
    *,
    emit: Emit,
    cache_dir: Path | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> SystemResult:
    """Train a system, or continue where it was interrupted.

    Args:
        system: Preset.
        settings: Of the study.
        folder: Of the study's run.
        cache_dir: Where the prepared corpus is kept; None: the Hugging Face cache.
        emit: Given a `TrainingProgress` after each update.
        stop_requested: Asked after each update.

    Returns:
        The result, which is also in the system's folder.

    Raises:
        KeyboardInterrupt: Stopped, after a checkpoint was saved.
    """
    torch.set_num_threads(1)  # one system a core: two threads of two systems would wait for each other
    with quiet_transformers():
        return _train_system(system, settings, folder, cache_dir, emit, stop_requested)


def _train_system(
    system: str,
    settings: QuickstartSettings,
    folder: Path,
    cache_dir: Path | None,
    emit: Emit,
    stop_requested: Callable[[], bool],
) -> SystemResult:
    unfinished = system_folder(folder, system, finished=False)
    tokenizer = bundled_tokenizer()
    text = _read_text(settings, tokenizer, cache_dir)
    model = _build(system, settings, tokenizer)
    trainer = LoopTrainer(
        model,
        training_arguments(
            unfinished,
            num_steps=settings.num_steps,
            batch_size=settings.batch_size,
            seed=settings.seed,
            save_steps=settings.save_steps,
            use_cpu=True,
        ),
        text.train,
        optimizer_settings=MuonAdamW(matrix_lr=settings.matrix_lr),
        on_progress=emit,
        stop_requested=stop_requested,
    )
    trainer.train(resume_from_checkpoint="auto")
    result = _judge(system, settings, model, tokenizer, text, StepLog(unfinished / METRICS_FILE), stop_requested)
    _finish(model, tokenizer, result, unfinished, system_folder(folder, system, finished=True))
    return result


def _read_text(settings: QuickstartSettings, tokenizer: PreTrainedTokenizerFast, cache_dir: Path | None) -> RunText:
    splits = load_splits(settings.source, cache_dir=cache_dir)
    train = pack_documents(splits["train"], tokenizer, settings.seq_len, cache_dir=cache_dir)
    held_out = pack_documents(splits["validation"], tokenizer, settings.seq_len, cache_dir=cache_dir)
    return packed_text(train, held_out, settings.num_validation_windows, len(tokenizer))


def _build(system: str, settings: QuickstartSettings, tokenizer: PreTrainedTokenizerFast) -> LoopedForCausalLM:
    config = LoopConfig.from_preset(
        system,
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_loops=settings.num_loops,
        num_attention_heads=settings.num_heads,
        max_position_embeddings=settings.seq_len,
        loop_seed=settings.seed,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(settings.seed)
    return LoopedForCausalLM(config)


def _judge(
    system: str,
    settings: QuickstartSettings,
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: RunText,
    log: StepLog,
    stop_requested: Callable[[], bool],
) -> SystemResult:
    records = log.read()
    scores = []
    for budget in dict.fromkeys((settings.num_loops, *settings.budgets)):
        if stop_requested():
            raise KeyboardInterrupt("stopped between two evaluations; training is complete")
        scores += evaluate_budgets(
            model, text.validation, [budget], batch_size=16, bytes_per_token=text.bytes_per_token
        )
    at_trained = scores[0]
    stability = assess_stability(
        validation_losses=[at_trained.loss],
        unigram_cross_entropy=text.unigram_loss,
        gradient_norms=[record["gradient_norm"] for record in records],
        residual_norms=[record["residual_norms"] for record in records],
    )
    assert stability.oscillation is not None, "gradient norms were given"
    shown = [score for score in scores if score.num_loops in settings.budgets]
    return SystemResult(
        system=system,
        num_loops=settings.num_loops,
        num_parameters=model.config.num_parameters(),
        tokens_seen=records[-1]["tokens_seen"],
        training_flops=records[-1]["flops"],
        unigram_loss=text.unigram_loss,
        loss=at_trained.loss,
        perplexity=at_trained.perplexity,
        bits_per_byte=at_trained.bits_per_byte or math.nan,
        verdict=stability.verdict,
        reason=stability.reason,
        log_gradient_norm_std=stability.oscillation.log_std,
        last_residual_norm=records[-1]["residual_norms"][-1],
        budgets=tuple(dataclasses.asdict(s) for s in sorted(shown, key=lambda s: s.num_loops)),
        samples=tuple(_sample(model, tokenizer, settings, m) for m in settings.sample_budgets),
    )


def _sample(
    model: LoopedForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: QuickstartSettings, num_loops: int
) -> dict[str, Any]:
    model.eval()
    torch.manual_seed(settings.seed)  # each budget draws the same random numbers
    prompt_ids = encode_prompt(tokenizer, settings.prompt)[: settings.seq_len // 2]
    ids = torch.tensor([prompt_ids])
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_loops=num_loops,
        max_new_tokens=min(settings.sample_tokens, settings.seq_len - ids.shape[1]),
        do_sample=True,
        temperature=0.8,
        top_k=40,
    )
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    continuation = continuation_text(tokenizer, prompt_ids, generated[0, len(prompt_ids) :].tolist())
    return {"num_loops": num_loops, "prompt": prompt, "continuation": continuation}


def _finish(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    result: SystemResult,
    unfinished: Path,
    finished: Path,
) -> None:
    """Turn the training folder into the trained system's: complete when the name changes, then the checkpoints go."""
    with writing(unfinished, SafetensorError):
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    write_json(unfinished / RESULT_FILE, dataclasses.asdict(result))
    with writing(finished):
        os.replace(unfinished, finished)
    remove_all(finished)
