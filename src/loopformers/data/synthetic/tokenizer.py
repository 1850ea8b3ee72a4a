"""The tokenizer of a task: its words, with spaces between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers

from loopformers.data.synthetic.contract import END, UNKNOWN, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["task_tokenizer"]


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the indices of `task.words`: text is words with spaces between them."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(task.words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
