"""Which of transformers' classes runs a checkpoint, and how much of it: for calibration, evaluation and serving alike.

Of a model of images (or sound) and text the language model alone runs, given tokens: the rest is taken out of the
empty model, so that its weights are never read.
"""

from collections.abc import Container
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from ptqpipe.errors import CheckpointError, arg
from ptqpipe.models.embedder import is_embedder

_LEFT_OUT = "_ptqpipe_left_out"
CACHES = ("cache", "cache_params", "past_key_values")  # what transformers calls a cache: today, and before
_NEED_IMAGES = {"idefics"}  # their forward refuses text alone, which its signature does not say


def causal_model_of(config: Any, path: Path) -> tuple[Any, Any]:
    """transformers' class of the causal model of ``config``, of the checkpoint at ``path``, and the config to make it
    with: of some image-text models (Qwen3.5, Llama 4) that is the text model alone, with its part of the config.

    CheckpointError where there is none, and for encoders and encoder-decoders, of whose layers transformers would make
    a causal model that they never were.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
        if encoder or config.is_encoder_decoder:
            raise _no_text(config, path)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text = config.get_text_config()
        return model_class, text if model_class.config_class is type(text) else config
    model_class = _with_images(config)
    if model_class is None:
        raise _no_text(config, path)
    if not _takes_text_alone(model_class, config):
        raise CheckpointError(
            f"{path} is a {config.model_type!r} model, which generates no text without an image, as calibrate, tune, "
            f"generate, eval and serve need; convert it without {arg('data')} and {arg('stats')}, which does not run "
            "the model, and serve the result with vLLM"
        )
    return model_class, config


def _no_text(config: Any, path: Path) -> CheckpointError:
    if is_embedder(path):
        return CheckpointError(
            f"{path} is a sentence embedder, which gives no probabilities of tokens, as generate, serve, plan's "
            f"measurements and {arg('method', 'kl')} need; use convert, calibrate, tune and eval with it"
        )
    return CheckpointError(
        f"{path} is a {config.model_type!r} model, which is no causal language model and no sentence embedder "
        f"(modules.json), as calibrate, tune, generate, eval and serve need; convert it without {arg('data')} and "
        f"{arg('stats')}, which does not run it"
    )


def embedder_model_of(config: Any, path: Path) -> tuple[Any, Any]:
    """transformers' class of a sentence embedder, which has no head, and the config to make it with. CheckpointError
    where there is none, and for encoder-decoders."""
    from transformers import MODEL_MAPPING

    model_class = MODEL_MAPPING.get(type(config), None)
    if isinstance(model_class, tuple) or model_class is None or config.is_encoder_decoder:
        raise CheckpointError(
            f"{path} is a {config.model_type!r} model, of which no sentence embedder is run here: encoders and "
            f"decoders alone are; convert it without {arg('data')} and {arg('stats')}, which does not run it"
        )
    return model_class, config


def layered_model_of(config: Any, path: Path) -> tuple[Any, Any]:
    """What calibrate and tune run layer by layer: a sentence embedder, else the causal model."""
    return (embedder_model_of if is_embedder(path) else causal_model_of)(config, path)


def leave_out_pooler(model: Any, filled: Container[str]) -> None:
    """Takes the pooler out of an empty encoder where ``filled``, its parameters that a checkpoint has, are none of the
    pooler's: an embedding is made of the hidden states, so many embedders are published without one."""
    pooler = getattr(model, "pooler", None)
    if pooler is not None and not any(f"pooler.{name}" in filled for name, _ in pooler.named_parameters()):
        model.pooler = None


def named_model_of(config: Any, path: Path) -> tuple[Any, Any]:
    """transformers' class that config.json names in ``architectures``, and the config to make it with; that of
    `causal_model_of` where it names none of this type, or one of images and text."""
    import transformers

    name = _named(config)
    named: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if is_model and named.config_class is type(config) and named is not _with_images(config):
        return named, config
    return causal_model_of(config, path)


def _named(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def cache_name(module: Any) -> str | None:
    """What a module's forward calls transformers' cache: by its name of today or an older one; None where it takes
    none."""
    parameters = signature(module.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """The keywords by which a model or its decoder is called with a cache, or with None."""
    name = cache_name(module)
    return {"use_cache": False} if cache is None or name is None else {name: cache, "use_cache": True}


def lacks_head(model: Any, filled: Container[str]) -> bool:
    """Whether a causal model has a head of its own and ``filled``, its parameters that a checkpoint has, no weights of
    it: those of an embedding model or a classifier."""
    head = model.get_output_embeddings()
    name = next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)
    return not (name is None or name in filled or name in (getattr(model, "all_tied_weights_keys", None) or {}))


def without_head(path: Path, model: Any) -> CheckpointError:
    """The error for a checkpoint of which `lacks_head` holds, where logits are needed."""
    if is_embedder(path):
        return _no_text(model.config, path)
    named = _named(model.config)
    what = f", and its config.json names {named}" if named else ""
    return CheckpointError(
        f"{path} has no language-model head{what}: embedding models and classifiers give no probabilities of tokens, "
        f"as eval, generate, serve, {arg('quality', 'best')}, {arg('moments', 'kl')} and pairs need; convert it "
        f"without {arg('data')}, or with {arg('quality')} fast or good"
    )


def _with_images(config: Any) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)


def _takes_text_alone(model_class: Any, config: Any) -> bool:
    parameters = signature(model_class.forward).parameters
    image = parameters.get("pixel_values")
    optional = image is None or image.default is not Parameter.empty
    if config.model_type in _NEED_IMAGES or "input_ids" not in parameters or not optional:
        return False
    return not (config.is_encoder_decoder or config.get_text_config().is_encoder_decoder)


def image_model_of(config: Any, path: Path) -> tuple[Any, Any]:
    """`causal_model_of`, with the parts for images where transformers has a class with them."""
    text_model = causal_model_of(config, path)
    return (_with_images(config), config) if takes_images(config, path) else text_model


def takes_images(config: Any, path: Path) -> bool:
    """Whether a model whose text the class of `causal_model_of` continues has parts for images, too."""
    if is_embedder(path):
        return False
    causal = causal_model_of(config, path)[0]
    whole = _with_images(config)
    return whole is not None and (causal is whole or config.get_text_config() is not config)


def with_note(header: str, config: Any, *, images: int = 0) -> str:
    """A command's header, which says of a model of images and text that vision tower and projector are left out, or how
    many of the samples have images that they see."""
    if _with_images(config) is None or config.get_text_config() is config:
        return header
    if images:
        return f"{header}\n(a model of images and text: {images} of the samples have images, its tower is in memory)"
    return f"{header}\n(a model of images and text: its language model runs, vision tower and projector are left out)"


def keep_language_model(model: Any) -> Any:
    """Takes everything out of an empty model that only images or sound pass: what lies neither in nor around the
    decoder, the embeddings and the head. A model of text stays whole. Returns the model."""
    gone = image_parts(model)
    for name in gone:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, None)
    setattr(model, _LEFT_OUT, gone)
    return model


def image_parts(model: Any) -> tuple[str, ...]:
    """The names of the modules with weights that only images or sound pass; none in a model of text."""
    if _with_images(model.config) is not type(model):
        return ()
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    kept = {module for part in parts if part is not None for module in part.modules()}
    return tuple(_outside(model, kept, ""))


def left_out_of(model: Any) -> tuple[str, ...]:
    return tuple(getattr(model, _LEFT_OUT, ()))


def _outside(module: Any, kept: set[Any], prefix: str) -> list[str]:
    """Names of the modules with weights below ``module`` that neither are kept nor hold one that is."""
    names = []
    for leaf, child in module.named_children():
        if child in kept or next(child.parameters(), None) is None:
            continue
        if kept.isdisjoint(child.modules()):
            names.append(f"{prefix}{leaf}")
        else:
            names += _outside(child, kept, f"{prefix}{leaf}.")
    return names
