"""What a configuration holds beside our own fields: transformers' fields, and what other tools have set on it.

A misspelt field must be refused, in a call as in a file. What a tool sets on `model.config` must survive save and load all
the same. So config.json lists the names of such additions under `extra_fields`, and a file may hold what it lists.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from loopformers.errors import CheckpointError, ConfigError, shorten, unknown_name
from loopformers.readers import read_json

__all__ = [
    "EXTRA_FIELDS", "INHERITED", "LOADER_ARGUMENTS", "StoredConfig", "check_inherited", "check_tokens", "read_extras",
]  # fmt: skip

EXTRA_FIELDS = "extra_fields"
"""Key of config.json that lists what other tools have added."""

INHERITED = {
    # What transformers itself writes into a config.json or passes through from_pretrained, in its whole range.
    "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward", "dtype", "experts_implementation",
    "id2label", "is_encoder_decoder", "label2id", "name_or_path", "num_labels", "output_attentions",
    "output_hidden_states", "problem_type", "quantization_config", "return_dict", "torch_dtype", "transformers_version",
    "_commit_hash", "_name_or_path",
}  # fmt: skip

LOADER_ARGUMENTS = {
    # What from_pretrained takes, of models and of configurations, in transformers' whole range and its last release before.
    "adapter_kwargs", "adapter_name", "allow_all_kernels", "attn_implementation", "cache_dir", "code_revision", "config",
    "device_map", "device_mesh", "disable_mmap", "distributed_config", "dtype", "experts_implementation", "force_download",
    "from_flax", "from_tf", "fusion_config", "generation_config", "gguf_file", "ignore_mismatched_sizes", "kernel_config",
    "key_mapping", "local_files_only", "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers", "offload_folder",
    "offload_state_dict", "output_loading_info", "proxies", "quantization_config", "resume_download", "return_unused_kwargs",
    "revision", "state_dict", "subfolder", "token", "torch_dtype", "tp_plan", "tp_size", "tqdm_class", "trust_remote_code",
    "use_auth_token", "use_kernels", "use_safetensors", "user_agent", "variant", "weights_only",
}  # fmt: skip

PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")


class StoredConfig(PreTrainedConfig):
    """A configuration whose fields are closed, and which reads and writes what others have added all the same."""

    @classmethod
    def own_fields(cls) -> dict[str, Any]:
        """Return the fields that are ours, with their defaults."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError at the first rule that our fields break."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' method; overrides are fields like any other, so they are checked and unknown ones refused.

        Raises:
            ConfigError: An unknown field, or a combination that is not legal.
            CheckpointError: The dictionary names an attention function that would have to be downloaded.
        """
        if "/" in str(config_dict.get("attn_implementation")):
            raise CheckpointError(
                f"the configuration names attn_implementation={shorten(config_dict['attn_implementation'])}, code that would be "
                "downloaded and run; remove it, and choose an attention function in from_pretrained"
            )
        own = cls.own_fields()
        overrides = {name: kwargs.pop(name) for name in own.keys() & kwargs.keys()}
        if not kwargs.get("return_unused_kwargs"):  # with it, transformers hands what is left to the model's loading
            extras = config_dict.get(EXTRA_FIELDS)
            left = {name for name in kwargs if not name.startswith("_")} - INHERITED - LOADER_ARGUMENTS
            if unknown := sorted(left.difference(extras if isinstance(extras, list) else [])):
                raise ConfigError(unknown_name("field", unknown[0], own))
        check_inherited(
            {name: value for name, value in kwargs.items() if value != "auto"}
        )  # before they are set unchecked
        return super().from_dict({**config_dict, **overrides}, **kwargs)

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> Any:
        read_json(json_file)  # refuses what is no object of reasonable size and depth
        return super()._dict_from_json_file(json_file)

    def to_dict(self) -> dict[str, Any]:
        """transformers' method; what other tools have set is listed, so that it can be told from a misspelt field."""
        fields = super().to_dict()
        if extras := _extra_names(fields, self.own_fields()):
            fields[EXTRA_FIELDS] = extras
        return fields

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method.

        Raises:
            ConfigError: The configuration has been changed to one that could not be loaded; nothing is written.
        """
        self.check_writable()
        return super().save_pretrained(*args, **kwargs)

    def check_writable(self) -> None:
        """Raise ConfigError where this configuration, written to a file, could not be read again."""
        fields = self.to_dict()
        _check_extras(fields, dir(type(self)))
        check_inherited(fields)
        self.check()


def check_inherited(fields: Mapping[str, Any]) -> None:
    """Check the types of transformers' fields, which it passes on unchecked.

    Raises:
        ConfigError: A value of the wrong type or range.
    """
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"{name}={shorten(value)} must be a floating point type, such as 'float32' or 'bfloat16'")
    for name, kind, what in (
        ("id2label", dict, "an object of labels by number"),
        ("label2id", dict, "an object of numbers by label"),
        ("architectures", list, "a list of class names"),
        ("attn_implementation", str, "the name of an attention function, such as 'sdpa' or 'eager'"),
        ("experts_implementation", str, "the name of a function"),
        ("auto_map", dict, "an object of class names"),
        ("output_attentions", bool, "true or false"),
        ("output_hidden_states", bool, "true or false"),
        ("return_dict", bool, "true or false"),
    ):
        if fields.get(name) is not None and not isinstance(fields[name], kind):
            raise ConfigError(f"{name}={shorten(fields[name])} must be {what}")
    labels = fields.get("id2label") or {}
    if not all(str(key).isdecimal() and isinstance(label, str) for key, label in labels.items()):
        raise ConfigError(f"id2label={shorten(labels)} must give each number a label, such as {{0: 'no', 1: 'yes'}}")
    count = fields.get("num_labels")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10**6):
        raise ConfigError(f"num_labels={shorten(count)} must be a whole number from 0 to {10**6:,}")
    if fields.get("problem_type") not in PROBLEM_TYPES:
        raise ConfigError(unknown_name("problem_type", fields["problem_type"], PROBLEM_TYPES[1:]))
    if fields.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder=True: a looped model is a decoder; leave it out")
    _check_quantization(fields.get("quantization_config"))


def _check_quantization(value: Any) -> None:
    if value is None or hasattr(value, "quant_method"):
        return
    if not isinstance(value, dict):
        raise ConfigError(
            f"quantization_config={shorten(value)} must be an object or one of transformers' quantisation configurations, such "
            "as BitsAndBytesConfig"
        )
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    is_bitsandbytes = value.get("load_in_4bit") or value.get("load_in_8bit")  # whose method may be left out
    method = value.get("quant_method", "bitsandbytes" if is_bitsandbytes else None)
    known = {"bitsandbytes", *(str(getattr(name, "value", name)) for name in AUTO_QUANTIZATION_CONFIG_MAPPING)}
    if not isinstance(method, str) or method not in known:
        raise ConfigError(unknown_name("quantization_config's quant_method", str(method)[:80], known))


def check_tokens(name: str, value: Any, vocab_size: int, *, several: bool = False) -> None:
    """Check the number of a special token.

    Raises:
        ConfigError: Not a token of the vocabulary.
    """
    for token in value if several and isinstance(value, list) else [value]:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size):
            raise ConfigError(
                f"{name}={shorten(value)} must be a token from 0 to {vocab_size - 1} (vocab_size={vocab_size}), or null for none"
            )


def read_extras(fields: dict[str, Any], reserved: Collection[str]) -> dict[str, Any]:
    """Take what other tools have added out of a configuration's fields, and return it.

    Args:
        fields: Changed in place: the additions and their list are taken out.
        reserved: Names that an addition would hide.

    Raises:
        CheckpointError: The list of additions is not one of names, or an addition would hide a part of the configuration.
    """
    names = fields.pop(EXTRA_FIELDS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{EXTRA_FIELDS}={shorten(names)} must list the names that other tools have added")
    if hidden := sorted(name for name in names if name in reserved):
        raise CheckpointError(
            f"{EXTRA_FIELDS} names {hidden[0]!r}, which is a part of the configuration itself; remove it from config.json"
        )
    return {name: fields.pop(name) for name in names if name in fields}


def _extra_names(fields: Mapping[str, Any], own: Collection[str]) -> list[str]:
    """Return the names of what other tools have added to a configuration that is written as `fields`."""
    return sorted(fields.keys() - own - INHERITED - {"model_type", EXTRA_FIELDS})


def _check_extras(fields: Mapping[str, Any], reserved: Collection[str]) -> None:
    """Check that what other tools have added can be written to config.json and read again.

    Raises:
        ConfigError: A value that JSON does not hold, or a name that hides a part of the configuration.
    """
    for name in fields.get(EXTRA_FIELDS, []):
        if name in reserved:
            raise ConfigError(
                f"config.{name} has been set, and it hides a part of the configuration; delete it to save"
            )
        try:
            json.dumps(fields[name])
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"config.{name}={shorten(fields[name])} cannot be stored in config.json ({error}); set plain numbers, texts, "
                "lists or objects, or delete it"
            ) from error
