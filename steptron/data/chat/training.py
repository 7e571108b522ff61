"""What a run must be to train on conversations."""

from __future__ import annotations

from collections.abc import Iterator

from steptron.config.schema import DatasetConfig
from steptron.config.stages import Curriculum, Stage
from steptron.data.manifest import read_manifest
from steptron.errors import ConfigError


def check_conversations(curriculum: Curriculum) -> None:
    """Refuses a run that does not start from a trained model, that would cut conversations, or trains on other data.

    Raises:
        ConfigError: lists every problem.
        DataError: a dataset that cannot be opened.
    """
    problems = []
    first = curriculum.stages[0].config
    if first.train.initial_weights is None:
        problems.append(
            "train.initial_weights: an assistant is made of a trained model: give its checkpoint, the folder of its "
            "run (the newest checkpoint), or the folder of a released model"
        )
    templates: dict[str, DatasetConfig] = {}
    for stage in curriculum.stages:
        problems += _of_stage(stage, templates)
    if len(templates) > 1:
        listed = "; ".join(f"{dataset.path} {template}" for template, dataset in templates.items())
        problems.append(
            f"data: datasets of different chat templates in one run: {listed}; build them with the same one"
        )
    if problems:
        raise ConfigError("conversations cannot be trained on like this", list(dict.fromkeys(problems)))


def _of_stage(stage: Stage, templates: dict[str, DatasetConfig]) -> Iterator[str]:
    where, data = f"stage {stage.name}: " if stage.name else "", stage.config.data
    if data.packing != "best_fit":
        yield f"{where}data.packing is {data.packing}, which cuts conversations: set it to best_fit"
    for key, datasets in (("data.train", data.train), ("data.validation", data.validation)):
        for number, dataset in enumerate(datasets):
            template = read_manifest(dataset.path).chat_template
            if template is None:
                yield (
                    f"{where}{key}.{number}.path: {dataset.path} has texts, not conversations (`steptron sft build` "
                    "writes those); `steptron pretrain` trains on any dataset"
                )
            else:
                templates.setdefault(template, dataset)
