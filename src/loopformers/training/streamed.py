"""How a trainer reads a stream: each rank its own part, and from its exact position after a resume; and a task's rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer

from loopformers.data.streaming import StreamedWindows
from loopformers.data.synthetic.rows import GeneratedRows
from loopformers.errors import ConfigError
from loopformers.files import write_whole
from loopformers.readers import read_json

__all__ = ["StreamedData"]


class StreamedData(Trainer):
    """`transformers.Trainer` whose training data may be `StreamedWindows` or `GeneratedRows`; others are left as they are.

    Every rank reads its own part of the documents, where accelerate would let each read all and keep a share. A checkpoint
    holds each rank's position, so a resumed run starts reading there, where transformers would fetch and drop every batch
    that was used before. Generated rows are read in their order, so that an update's rows depend on (seed, step) alone.
    """

    _windows_used = 0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches of this rank's part of the stream.

        Raises:
            ConfigError: Worker processes, whose positions could not be saved.
        """
        stream = self.train_dataset
        if not isinstance(stream, StreamedWindows):
            return super().get_train_dataloader()
        if self.args.dataloader_num_workers:
            raise ConfigError(
                f"dataloader_num_workers={self.args.dataloader_num_workers} would take the stream's position where no "
                "checkpoint sees it; use 0: the tokenizer already uses every core"
            )
        # Without a generator of its own the loader draws a number from the global one, and resuming would shift it.
        return DataLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            drop_last=True,
            generator=torch.Generator(),
        )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.train_dataset, GeneratedRows):
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch the microbatches of a step, and count the windows that they use."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(self.train_dataset, StreamedWindows):
            self._windows_used += sum(len(sample["input_ids"]) for sample in samples)
        return samples, num_items

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train to the end; a stream continues from its position in the checkpoint.

        Raises:
            CheckpointError: The checkpoint holds no position of this stream for this rank.
            ConfigError: A resumed run reads its data from an iterable that cannot be positioned.
        """
        stream = self.train_dataset
        if resume_from_checkpoint and not isinstance(stream, StreamedWindows) and not hasattr(stream, "__len__"):
            # transformers would skip batches of a stream that starts anew, and get it wrong where the stream ends in between
            raise ConfigError(
                f"a run over a {type(stream).__name__} cannot be resumed: an iterable does not say where it stood; train on "
                "StreamedWindows, which stores its position in every checkpoint, or on a dataset with a length"
            )
        if isinstance(stream, StreamedWindows):
            stream.set_rank(self.args.process_index, self.args.world_size)
            self._windows_used = 0
            if resume_from_checkpoint:
                self.args.ignore_data_skip = True
                position: dict[str, Any] = read_json(
                    self._position_file(resume_from_checkpoint),
                    remedy="resume a checkpoint of a run that streamed its data, on as many ranks",
                )
                stream.load_state_dict(position)
                self._windows_used = stream.state_dict()["position"]["num_windows"]
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write what each rank needs to resume: its random states, and its position in the stream."""
        super()._save_rng_state(output_dir)
        if isinstance(self.train_dataset, StreamedWindows):
            state = self.train_dataset.state_dict(self._windows_used)
            write_whole(self._position_file(output_dir), json.dumps(state))

    def _position_file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"stream_{self.args.process_index}.json"
