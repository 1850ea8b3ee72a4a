"""Trains a recipe: everything is checked first, then text, model and trainer are made, then the same call resumes.

A run's folder:

    recipe.yaml, versions.json       what was asked for, and what ran it; both are in every checkpoint too
    corpus.json                      fingerprints of the text, likewise
    checkpoint-<step>/               model, tokenizer, optimiser, data position, random states
    metrics.jsonl, validation.jsonl  a record an update, and one an evaluation
    config.json, model.safetensors, tokenizer files, result.json     the trained model, at the end
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from loopformers.analysis.stability import Stability, assess_stability
from loopformers.data.packing import PackedTokens
from loopformers.data.streaming import StreamedWindows
from loopformers.data.synthetic.rows import GeneratedRows
from loopformers.errors import CheckpointError, ConfigError, MissingExtraError, unknown_name
from loopformers.evaluation.budget import BudgetResult
from loopformers.evaluation.exact_match import task_results
from loopformers.files import write_whole, writing
from loopformers.folders import owned
from loopformers.laws import Law
from loopformers.model.config import LoopConfig
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.model.quiet import quiet_transformers
from loopformers.model.tokenizer import vocabulary_size
from loopformers.schedule import Schedule
from loopformers.training.callbacks import BudgetValidationCallback
from loopformers.training.engine import EngineSettings
from loopformers.training.idle_fields import check_effects
from loopformers.training.launcher import world_size
from loopformers.training.memory_check import check_memory
from loopformers.training.progress import ProgressListener
from loopformers.training.recipe import ModelRecipe, Recipe, build_law, check_budgets
from loopformers.training.recipe_file import dump
from loopformers.training.run_folder import (
    CORPUS_FILE,
    RECIPE_FILE,
    RESULT_FILE,
    VALIDATION_FILE,
    VERSIONS_FILE,
    RunResult,
    check_corpus,
    check_folder,
    corpus_fingerprints,
    read_result,
    versions,
)
from loopformers.training.run_text import make_rows, read_stream, read_text, recipe_tokenizer
from loopformers.training.sharding import gather_weights, is_sharded
from loopformers.training.step_log import METRICS_FILE, StepLog
from loopformers.training.tensorboard import continue_tensorboard
from loopformers.training.trainer import LoopTrainer, training_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PreparedRun", "model_config", "prepare"]

ValidationListener = Callable[[int, BudgetResult, Stability], None]
"""Called on the main process with the step, the score at the trained number of loops, and the verdict so far."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose every part has been checked, and of which nothing has been written."""

    recipe: Recipe
    """As resolved: sizes that follow from the data are filled in."""
    config: LoopConfig
    """The model's."""
    law: Law
    """Draws the loops of a microbatch."""
    budgets: tuple[Schedule, ...]
    """Runs to score, the trained one first."""
    arguments: TrainingArguments
    """Of the trainer."""
    tokenizer: PreTrainedTokenizerFast
    """Its tokenizer."""
    train_windows: PackedTokens | StreamedWindows | GeneratedRows
    """Training windows, or rows of a task."""
    validation_windows: list[dict[str, Any]]
    """Windows to score."""
    unigram_loss: float
    """Nats per token of token frequencies alone, on those."""
    bytes_per_token: float | None
    """Of the validation split; None where it is streamed, and its bytes are not counted."""
    corpus: dict[str, str] | None
    """Fingerprint of each source of text; None where a task makes the rows."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.training.output_dir)

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes and prints."""
        return bool(self.arguments.process_index == 0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an update, over all processes."""
        return self.recipe.training.batch_size * self.recipe.seq_len

    def finished(self) -> RunResult | None:
        """Return the result of a run that is complete, or None."""
        return read_result(self.folder)

    def train(
        self,
        *,
        on_progress: ProgressListener | None = None,
        on_validation: ValidationListener | None = None,
        stop_requested: Callable[[], bool] | None = None,
    ) -> RunResult:
        """Train to the end, from where the folder's run stands.

        Args:
            on_progress: Called after each update on the main process.
            on_validation: Called after each evaluation on the main process.
            stop_requested: Asked after each update; True acts as Ctrl-C does.

        Raises:
            ConfigError: The folder holds another run, or another process owns it.
            CheckpointError: No checkpoint of the run is whole, or its records are gone.
            NonFiniteError: Training diverged; weights and checkpoints are as they were.
            KeyboardInterrupt: Stopped, after a checkpoint was saved; the same call continues.
        """
        with owned(self.folder) if self.is_main_process else contextlib.nullcontext():
            return self._train(on_progress, on_validation, stop_requested)

    def _train(
        self,
        on_progress: ProgressListener | None,
        on_validation: ValidationListener | None,
        stop_requested: Callable[[], bool] | None,
    ) -> RunResult:
        if self.is_main_process:
            self._claim()
        _wait(self.arguments)
        if (result := self.finished()) is not None:
            return result
        model = build_model(self.config, self.recipe)
        validation = BudgetValidationCallback(
            self.validation_windows,
            self.budgets,
            every_steps=self.recipe.evaluation.interval or self.recipe.training.steps,
            log=StepLog(self.folder / VALIDATION_FILE),
            batch_size=self.recipe.evaluation.batch_size,
            bytes_per_token=self.bytes_per_token,
            refine=None if self.recipe.task is None else partial(task_results, dataset=self.validation_windows),
        )
        trainer = LoopTrainer(
            model,
            self.arguments,
            self.train_windows,
            optimizer_settings=self.recipe.optimizer,
            lr_schedule=self.recipe.lr_schedule,
            law=self.law,
            engine=engine_settings(self.recipe),
            unigram_loss=self.unigram_loss,
            checkpoint_files=self._provenance(),
            on_progress=on_progress,
            stop_requested=stop_requested,
            callbacks=[validation, _LiveVerdict(self, validation, on_validation)],
            processing_class=self.tokenizer,
        )
        continue_tensorboard(trainer)
        with quiet_transformers():
            trainer.train(resume_from_checkpoint="auto")
        result = self._judge(validation.last or validation.score(model))
        trained = trainer.accelerator.unwrap_model(trainer.model)
        weights = gather_weights(trained) if is_sharded(trained) else None  # every rank has a part
        if self.is_main_process:
            self._finish(trained, weights, result)
        _wait(self.arguments)
        return result

    def assess(self, loss: float) -> Stability:
        """Return the verdict on the run so far, given its validation loss at the trained number of loops."""
        records = StepLog(self.folder / METRICS_FILE).read()
        norms = [record["residual_norms"] for record in records if record["residual_norms"]]
        shallowest = min(map(len, norms), default=0)  # a law may draw other depths: judge the loops that all have
        return assess_stability(
            validation_losses=[loss],
            unigram_cross_entropy=self.unigram_loss,
            gradient_norms=[record["gradient_norm"] for record in records],
            residual_norms=[record[:shallowest] for record in norms],
        )

    def _judge(self, scores: Sequence[BudgetResult]) -> RunResult:
        records = StepLog(self.folder / METRICS_FILE).read()
        steps = self.recipe.training.steps
        if [record["step"] for record in records] != list(range(1, steps + 1)):
            raise CheckpointError(
                f"{str(self.folder / METRICS_FILE)!r} holds {len(records):,} records of a run of {steps:,} updates: some were "
                "removed while it ran, and no result can rest on the others; restore the file and run the same command again"
            )
        last = records[-1]
        stability = self.assess(scores[0].loss)
        return RunResult(
            fingerprint=self.recipe.fingerprint(),
            steps=last["step"],
            tokens_seen=last["tokens_seen"],
            training_flops=last["flops"],
            num_parameters=self.config.num_parameters(),
            unigram_loss=self.unigram_loss,
            loss=scores[0].loss,
            verdict=stability.verdict,
            reason=stability.reason,
            budgets=tuple(dataclasses.asdict(score) for score in scores),
            verdict_since=last.get("verdict_since"),
            skipped_steps=last.get("skipped_steps", 0),
        )

    def _provenance(self) -> dict[str, str]:
        texts = {RECIPE_FILE: dump(self.recipe), VERSIONS_FILE: json.dumps(versions(), indent=2) + "\n"}
        if self.corpus is not None:
            texts[CORPUS_FILE] = json.dumps(self.corpus, indent=2) + "\n"
        return texts

    def _claim(self) -> None:
        """Make the folder this run's own."""
        check_folder(self.recipe)
        if self.finished() is not None:
            return
        check_corpus(self.folder, self.corpus)
        for name, text in self._provenance().items():
            write_whole(self.folder / name, text)

    def _finish(self, model: Any, weights: dict[str, Any] | None, result: RunResult) -> None:
        with quiet_transformers(), writing(self.folder, SafetensorError):
            model.save_pretrained(self.folder, state_dict=weights)
            self.tokenizer.save_pretrained(self.folder)
        write_whole(self.folder / RESULT_FILE, json.dumps(dataclasses.asdict(result), indent=2) + "\n")


class _LiveVerdict(TrainerCallback):
    """Judges the run after each evaluation."""

    def __init__(
        self, run: PreparedRun, validation: BudgetValidationCallback, listener: ValidationListener | None
    ) -> None:
        self.run, self.validation, self.listener = run, validation, listener
        self.seen: Sequence[BudgetResult] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a new evaluation."""
        scores = self.validation.last
        if scores and scores is not self.seen and self.listener is not None and state.is_world_process_zero:
            self.listener(state.global_step, scores[0], self.run.assess(scores[0].loss))
        self.seen = scores


# -- preparation -----------------------------------------------------------------------------------------------


def prepare(recipe: Recipe) -> PreparedRun:
    """Check a recipe against everything that it names, and read its text. Writes nothing but the cache of the text.

    Raises:
        ConfigError: A rule between fields is broken, the model cannot fit this machine, or the folder holds another
            run or cannot be written.
        DataError: Text is missing, empty, or too short for a window or a batch.
    """
    check_folder(recipe, compare=False)
    with quiet_transformers():
        tokenizer = recipe_tokenizer(recipe)
    config = model_config(recipe, tokenizer)
    law = build_law(recipe, config)
    budgets = check_budgets(recipe.evaluation.budgets, config)
    check_memory(recipe, config, law)
    recipe = dataclasses.replace(recipe, model=_resolved_model(recipe, config))
    check_folder(recipe)
    corpus = corpus_fingerprints(recipe)
    if read_result(Path(recipe.training.output_dir)) is None:
        check_corpus(Path(recipe.training.output_dir), corpus)
    arguments = build_arguments(recipe)
    with arguments.main_process_first(desc="reading text"):  # the others find it in the cache
        if recipe.task is not None:
            text = make_rows(recipe, recipe.task, config.vocab_size)
        else:
            text = (read_stream if recipe.data.streaming else read_text)(recipe, tokenizer, config.vocab_size)
    return PreparedRun(
        recipe=recipe,
        config=config,
        law=law,
        budgets=budgets,
        arguments=arguments,
        tokenizer=tokenizer,
        train_windows=text.train,
        validation_windows=text.validation,
        unigram_loss=text.unigram_loss,
        bytes_per_token=text.bytes_per_token,
        corpus=corpus,
    )


def model_config(recipe: Recipe, tokenizer: Any = None) -> LoopConfig:
    """Return the model's configuration; what the recipe leaves open follows from the tokenizer, the windows and the seed.

    Args:
        recipe: The recipe.
        tokenizer: Its tokenizer; None: the recipe or the preset gives the vocabulary.

    Raises:
        ConfigError: An illegal field, one without effect, a vocabulary smaller than the tokenizer's, or windows beyond
            learned positions.
    """
    fields: dict[str, Any] = {
        "max_position_embeddings": recipe.seq_len,
        "loop_seed": recipe.training.seed,
    }
    if tokenizer is not None:
        fields["vocab_size"] = vocabulary_size(tokenizer)
        fields |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LoopConfig.from_preset(recipe.model.preset, **{**fields, **recipe.model.overrides})
    if tokenizer is not None and config.vocab_size < vocabulary_size(tokenizer):
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {vocabulary_size(tokenizer)} entries; leave "
            "it out, or give at least that many"
        )
    if config.position_embedding == "learned" and config.max_position_embeddings < recipe.seq_len:
        raise ConfigError(
            f"{'data' if recipe.task is None else 'task'}.seq_len={recipe.seq_len} is beyond model.max_position_embeddings="
            f"{config.max_position_embeddings} learned positions; leave the latter out, or give at least that many"
        )
    check_effects(recipe, config)
    return config


def _resolved_model(recipe: Recipe, config: LoopConfig) -> ModelRecipe:
    sizes = {name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings")}
    return ModelRecipe(preset=recipe.model.preset, overrides={**sizes, **recipe.model.overrides})


def build_model(config: LoopConfig, recipe: Recipe) -> LoopedForCausalLM:
    """Return the model with the weights of the recipe's seed."""
    torch.manual_seed(recipe.training.seed)
    return LoopedForCausalLM(config)


def engine_settings(recipe: Recipe) -> EngineSettings:
    """Return what the recipe says of memory, time and failures."""
    training = recipe.training
    return EngineSettings(
        loss_chunk_tokens=training.loss_chunk_tokens,
        activation_checkpointing=training.activation_checkpointing,
        num_kept_loops=training.kept_loops if training.activation_checkpointing else None,
        num_grad_loops=training.num_grad_loops,
        compile_layers=training.compile_layers,
        shard=training.shard,
        skip_non_finite=training.skip_non_finite,
    )


def build_arguments(recipe: Recipe) -> TrainingArguments:
    """Return the trainer's arguments on this process.

    Raises:
        ConfigError: The batch does not divide among processes and microbatches.
    """
    training = recipe.training
    num_processes = world_size()
    parts = num_processes * training.gradient_accumulation
    if training.batch_size % parts:
        raise ConfigError(
            f"training.batch_size={training.batch_size} does not divide into {num_processes} process(es) x "
            f"gradient_accumulation={training.gradient_accumulation} microbatches; the nearest that does is "
            f"{max(1, round(training.batch_size / parts)) * parts}"
        )
    if training.shard and num_processes == 1:
        raise ConfigError(
            "training.shard=true divides the model over processes, and this is the only one; start several with torchrun, or "
            "leave it out"
        )
    check_reporters(training.report_to)
    on_cpu = not torch.cuda.is_available()
    return training_arguments(
        training.output_dir,
        num_steps=training.steps,
        batch_size=training.batch_size // parts,
        seed=training.seed,
        save_steps=training.checkpoint_interval,
        gradient_accumulation_steps=training.gradient_accumulation,
        save_total_limit=training.checkpoints_kept,
        max_grad_norm=training.clip or 0.0,
        bf16=training.precision == "bfloat16",
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        report_to=list(training.report_to),
        logging_strategy="steps" if training.report_to else "no",
        logging_steps=training.log_interval,
        **({"ddp_backend": "gloo"} if on_cpu and num_processes > 1 else {}),
    )


def check_reporters(names: Sequence[str]) -> None:
    """Raise ConfigError or MissingExtraError unless transformers knows each name and its package is installed."""
    known = {*INTEGRATION_TO_CALLBACK, "all"}
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name("training.report_to", name, known))
        if name != "all" and name not in get_available_reporting_integrations():
            raise MissingExtraError(
                f"training.report_to={name!r} needs a package that is not installed; pip install {name}, or leave it out"
            )


def _wait(arguments: TrainingArguments) -> None:
    if arguments.world_size > 1:
        torch.distributed.barrier()
