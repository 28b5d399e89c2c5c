"""A model's own processor: of a chat's text and its images, tokens and what the model takes beside them.

transformers makes it of the checkpoint's files. What it needs torchvision for alone (videos) is left out where that is
not installed.
"""

from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import refuse_pipes
from ptqpipe.errors import CheckpointError, PtqError, UsageError, first_line, is_no_memory, missing_package
from ptqpipe.runtime.creating import quiet

_FILES = ("processor_config.json", "preprocessor_config.json")
_NOT_INPUTS = ("input_ids", "attention_mask")


class Processor:
    """The processor of the checkpoint at ``path``, whose config is ``config``. CheckpointError without a usable one.

    token     stands in tokens for each token of an image
    marks     what stands in text for an image, and for each of its tokens
    template  its chat template, None if it has none
    """

    def __init__(self, path: Path, config: Any) -> None:
        refuse_pipes(path)
        token = getattr(config, "image_token_id", None)
        if not any((path / name).is_file() for name in _FILES) or not isinstance(token, int):
            what = f"none of {', '.join(_FILES)}" if isinstance(token, int) else "no image_token_id in its config.json"
            raise CheckpointError(
                f"{path} has {what}, which images need; copy the files of the model's publisher there"
            )
        try:
            with quiet():
                self._made = _load(path, config)
        except PtqError:
            raise
        except ImportError as error:
            raise UsageError(f"the images of {path}: {first_line(error)}; install that package") from None
        except Exception as error:  # of what kind depends on the processor's own code
            if is_no_memory(error):
                raise
            raise CheckpointError(
                f"transformers cannot create an image processor from {path}: {first_line(error)}; check its "
                f"{' and '.join(name for name in _FILES if (path / name).is_file())}"
            ) from None
        self.token: int = token
        marks = (getattr(self._made, "image_token", None), self._made.tokenizer.convert_ids_to_tokens(token))
        self.marks = tuple(dict.fromkeys(mark for mark in marks if isinstance(mark, str)))
        self.template: str | None = getattr(self._made, "chat_template", None)

    def __call__(self, text: str, images: list[Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """(tokens, the model's further inputs) of a chat's text, with a mark for each of ``images`` in it.

        UsageError where the marks are not as many, or the processor refuses the images.
        """
        try:
            inputs = self._made(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        except Exception as error:
            raise UsageError(f"the model's processor refuses these images: {first_line(error)}") from None
        tokens = tuple(int(token) for token in inputs["input_ids"][0])
        if self.token not in tokens:
            raise UsageError("the model's chat template has no place for these images; expected one for each")
        return tokens, {name: value for name, value in inputs.items() if name not in _NOT_INPUTS}


def _load(path: Path, config: Any) -> Any:
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    processor: Any = processor_class_from_name(PROCESSOR_MAPPING_NAMES.get(config.model_type, ""))
    if processor is None or not hasattr(processor, "get_attributes"):
        name = PROCESSOR_MAPPING_NAMES.get(config.model_type, "a processor")
        raise missing_package(name, "torchvision", "ptqpipe[images]")
    return _without_videos(processor, path)


def _without_videos(processor: Any, path: Path) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer

    class Still(processor):  # type: ignore[misc]  # has no types
        """The class, which takes None for a part."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """The class's own check, which also accepts None."""
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    loaders = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    options, _ = processor.get_processor_dict(path, local_files_only=True)
    parts = [
        loaders[name].from_pretrained(path, local_files_only=True, trust_remote_code=False) if name in loaders else None
        for name in processor.get_attributes()
    ]
    return Still.from_args_and_dict(parts, options)
