"""What of a quality's preset a model allows, and why the rest is left out."""

from dataclasses import replace
from pathlib import Path

from ptqpipe.calibration.rows import weighted
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.plan import foldable_rotations, matrix_bytes
from ptqpipe.errors import PtqError
from ptqpipe.models.embedder import is_embedder
from ptqpipe.models.folding.find_structure import find_structure
from ptqpipe.models.language_model import takes_images
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.presets import QualityPreset
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.recipe.recipe import Recipe
from ptqpipe.run.quantities import disk_size
from ptqpipe.runtime.loading import read_layered_config

MATRICES = 128_000_000  # bytes of a record that the matrices of rotations may take: half of what is read


def own_head_bytes(preset: QualityPreset | None, source: Source) -> int:
    """What a head takes that becomes a tensor of its own; 0 for any other one."""
    if preset is None or "rotate_residual" not in preset.rotations:
        return 0
    structure = find_structure(source.tensors, source.reader.config)
    return source.reader.entries[structure.embeddings[0]].nbytes if structure.tied else 0


def rotatable(preset: QualityPreset | None, source: Source, recipe: Recipe, *, untie: bool) -> QualityPreset | None:
    """The preset with those of its rotations that can be learned for this model, and why the others cannot be."""
    if preset is None or not preset.rotations:
        return preset
    if is_embedder(source.reader.path):
        return _without_rotations(preset, "they are learned for models that continue text, and this is an embedder")
    scheme, reader = recipe.schemes()[0], source.reader
    if recipe.rotations:
        return _without_rotations(preset, "the recipe rotates inputs while the model runs")
    if takes_images(read_layered_config(reader.path), reader.path):
        return _without_rotations(preset, "they are learned from text alone, and the model takes images")
    if source.container is not None:
        return _without_rotations(preset, "the model is quantized already")
    options = TransformOptions(transforms=preset.rotations, learn=preset.steps, format=scheme.name, untie=untie)
    try:
        structure = find_structure(source.tensors, reader.config)
    except PtqError as error:
        return _without_rotations(preset, _for_record(str(error)))
    names, refused = foldable_rotations(structure, options)
    refused = [_for_record(reason).replace("is refused:", "is left out:", 1) for reason in refused]
    if matrix_bytes(names, structure, options) > MATRICES and "rotate_values" in names:
        names.remove("rotate_values")
        refused.append(f"rotate_values is left out: the matrices would take over {disk_size(MATRICES)} in the record")
    return preset._replace(rotations=",".join(names), without=(*preset.without, *refused))


def with_own_text(preset: QualityPreset, work: PipelineOptions, path: Path) -> tuple[QualityPreset, PipelineOptions]:
    """The call with the model's own text beside its data, half of the windows; or the preset, and why there is none."""
    if takes_images(read_layered_config(path), path):
        why = "the model takes images, and writes text alone"
    elif is_embedder(path):
        why = "an embedder writes none"
    elif work.text_field is not None:
        why = f"field {work.text_field} is in no row of it"
    else:
        weights = sum(weighted(name)[1] or 1.0 for name in work.data)
        return preset, replace(work, data=(*work.data, f"{validate.SELF}={weights!r}"))
    return preset._replace(own_text=False, without=(*preset.without, f"the model's own text is left out: {why}")), work


def foldable(preset: QualityPreset | None, source: Source) -> QualityPreset | None:
    """The preset, without its transform where this family's layers are not known well enough to fold it."""
    if preset is None or not preset.transform:
        return preset
    try:
        find_structure(source.tensors, source.reader.config)
    except PtqError as error:
        line = f"{preset.transform} is left out: {_for_record(str(error))}"
        return preset._replace(transform="", without=(*preset.without, line))
    return preset


def _for_record(message: str) -> str:
    """A message without its remedy, which spells options for who reads it: the record's bytes stay the same."""
    return message.partition(";")[0]


def _without_rotations(preset: QualityPreset, why: str) -> QualityPreset:
    return preset._replace(rotations="", without=(*preset.without, f"rotations are left out: {why}"))
