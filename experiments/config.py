"""The settings of an experiment: YAML files, command-line overrides, and errors that name the mend. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from experiments.artifacts import write_whole
from experiments.config_errors import explain
from miles_ext.capability import ArmKind
from miles_ext.sampling import Capture, FilterOrder, SamplingSpec
from rollout.config import RolloutConfig
from trainer.config import TrainerConfig

CONFIG_FILE = "config.yaml"
ARM_SECTIONS = ("sampling", "trainer", "rollout")
"""What an arm may change. Prompts, seeds and initial weights are the same in every arm, or the comparison is void."""


def _folder_name(name: str) -> str:
    if not name or set(name) & set("/\\#?%: ") or name.startswith("."):
        raise ValueError("accepted: a name that can be a folder, without spaces or any of / \\ # ? % :")
    return name


FolderName = Annotated[str, AfterValidator(_folder_name)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TaskConfig(Section):
    """What is asked, and how often."""

    name: Literal["addition", "text"] = "addition"
    """`addition` is made up as it goes and fits the tiny target; `text` asks the questions of files."""
    train_file: Path | None = None
    """Questions of `text`: JSON lines, asked in an order that the seed settles, each once before any comes again."""
    held_out_file: Path | None = None
    """Questions of `text` that are evaluated on: the first eval_problems of them, in turn where there are fewer."""
    preamble: Path | None = None
    """JSON list of chat messages put before every question: a system message, worked examples."""
    question_field: str = "question"
    """Field of a line that is asked, in the chat template of the target."""
    answer_field: str = "answer"
    """Field of a line that is the answer, a number."""
    reward: Literal["exact", "close"] = "exact"
    """Of the last number of a response that ended: `exact` gives 1 for the answer, `close` 1 less its relative error,
    and at least 0. A response that did not end gets 0."""
    prompts: int = Field(default=16, ge=1)
    """Prompts a step."""
    samples: int = Field(default=8, ge=1)
    """Responses a prompt: its group."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Tokens of a response at most; rollout.context_length may end it sooner."""
    eval_problems: int = Field(default=256, ge=1)
    """Held-out problems, one response each, before the first update and after the last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "text" and (self.train_file is None or self.held_out_file is None):
            raise ValueError("name is text without train_file and held_out_file; name both, or set name to addition")
        return self


class ModelConfig(Section):
    """Checkpoint folders in the Hugging Face layout, absolute or relative to the working directory."""

    target: Path = Path("experiments/models/tiny/target")
    """The model that is trained and sampled."""
    draft: Path | None = Path("experiments/models/tiny/draft")
    """Used by the arms of kind dflash and dflash2; it stays as it is while the target learns."""

    def require_files(self, arms: Sequence[ArmConfig]) -> None:
        """Raise ValueError naming the folder and the file that a run of these arms would miss."""
        folders = {"model.target": self.target}
        speculative = [arm.name for arm in arms if arm.kind != "regular"]
        if speculative:
            if self.draft is None:
                raise ValueError(f"model.draft is null, but arms {speculative} need one; set it to a draft's folder")
            folders["model.draft"] = self.draft
        for key, folder in folders.items():
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"{key} is {folder}, where there is no config.json; accepted: a checkpoint folder, absolute or "
                    f"relative to {Path.cwd()}; `python -m experiments models make` builds the small ones"
                )


class SamplingConfig(Section):
    """The law that tokens are drawn from and what is recorded of it (see miles_ext/sampling.py)."""

    temperature: float = 1.0
    """Logits are divided by it; above 0, since greedy decoding has no law to train on."""
    top_k: int = 0
    """Keep the k likeliest tokens and ties with the last of them; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest head of at least this mass and ties with its last token; 1 is off."""
    filter_order: FilterOrder = "top_k_first"
    """`top_k_first` applies top_p to the renormalised top-k law, `joint` applies both to the unfiltered law."""
    capture: Capture = "complete"
    """`complete` records the whole support of each token, `head` its head_size likeliest (unfiltered sampling only)."""
    head_size: int = 32
    """Tokens of a captured head."""
    max_support: int = 4096
    """A complete support with more tokens is an overflow, never cut."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature == 0:
            raise ValueError("temperature is 0: greedy decoding has no law to train on; accepted: above 0")
        self.spec(0)
        return self

    def spec(self, seed: int) -> SamplingSpec:
        return SamplingSpec(**self.model_dump(), seed=seed)


class CheckpointConfig(Section):
    """What an interrupted run goes on from (`--resume auto`)."""

    every: int = Field(default=10, ge=0)
    """Steps from one checkpoint to the next; 0 writes one after the last step alone."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints of an arm that stay on disk."""


class AlarmConfig(Section):
    """When a step is worth a warning: metrics alarm/*, on the console, in W&B and in the report; nothing is stopped."""

    window: int = Field(default=8, ge=1)
    """Steps that reward and accept length are averaged over; they are judged from the second window on."""
    reward_drop: float = Field(default=0.5, ge=0)
    """Rings where mean reward falls below its best window by more than this part of it; 0 is off."""
    accept_drop: float = Field(default=0.3, ge=0)
    """The same for the accept length."""
    logprob_gap: float = Field(default=0.25, ge=0)
    """Rings where trainer and sampler differ by more on a sampled token, in nats."""
    entropy_low: float = Field(default=1e-3, ge=0)
    """Rings where the entropy of the trainer's law falls below, in nats."""
    entropy_high: float = Field(default=1e3, ge=0)
    """Rings where it rises above, in nats."""
    untrainable: float = Field(default=1e-3, ge=0, le=1)
    """Rings where a larger part of the groups so far was left out for its content (trainer.content_failure)."""


class ArmConfig(Section):
    """One side of the comparison."""

    name: FolderName
    """Its folder and its name in W&B."""
    kind: ArmKind
    """How responses are decoded: one token a pass, drafts proposed greedily, or drafts sampled along a path."""
    overrides: dict[str, Any] = {}
    """Dotted settings that differ in this arm, such as `{trainer.estimator.centering: diagnose}`; sampling, trainer and
    rollout only, since prompts, seeds and initial weights are the same in every arm."""


class ExperimentConfig(Section):
    """An experiment: every arm with every seed, then the comparison."""

    name: FolderName
    """Group of the runs in W&B and folder of the results; the name of the settings file where it says none."""
    arms: tuple[ArmConfig, ...] = Field(min_length=1)
    """The sides of the comparison."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Each seed gives every arm its prompts and draws."""
    steps: int = Field(default=40, ge=1)
    """Rollouts, each followed by trainer.updates_per_rollout updates and a handoff; the audit asks for two at least."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that sampling runs ahead of training, and so the handoffs by which a rollout's weights are older than those
    that train on it; 0 samples and trains in turn."""
    output_dir: Path = Path("runs")
    """Results go to output_dir/name."""
    save_support: Literal["audited", "all"] = "audited"
    """Steps whose recorded laws are kept in the rollout files: the one that the audit recomputes, or every one."""
    wandb_mode: Literal["offline", "online", "disabled"] | None = None
    """null follows WANDB_MODE, else online where a WANDB_API_KEY is set, else offline."""
    wandb_project: str = "score-centering"
    """Project that the W&B runs are filed under."""
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alarms: AlarmConfig = AlarmConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def audited_step(self) -> int:
        """Step (from 0) kept whole for the audit, laws and logit gradient: the first on handed-off weights."""
        return min(1, self.steps - 1)

    @property
    def cpus(self) -> float:
        """Logical CPUs that one arm reserves on the cluster."""
        workers = (self.rollout, self.trainer)
        return sum(side.workers * side.cpus_per_worker for side in workers)

    def for_arm(self, arm: ArmConfig) -> ExperimentConfig:
        """These settings with the arm's overrides applied. Raises ValueError naming the override."""
        raw = self.model_dump(mode="json", exclude={"arms"}) | {"arms": [{"name": arm.name, "kind": arm.kind}]}
        for key, value in arm.overrides.items():
            if key.partition(".")[0] not in ARM_SECTIONS:
                raise ValueError(f"arm {arm.name!r} overrides {key}; an arm may change {', '.join(ARM_SECTIONS)} alone")
            _set(raw, key, value)
        try:
            return ExperimentConfig.model_validate(raw)
        except ValidationError as error:
            raise ValueError(f"arm {arm.name!r}: {explain(error, ExperimentConfig)}") from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        for plural, values in (("arm names", [arm.name for arm in self.arms]), ("seeds", [str(s) for s in self.seeds])):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{plural} {', '.join(twice)} occur twice; accepted: each once")
        if self.max_staleness and self.rollout.mismatch.lag:
            raise ValueError(
                f"max_staleness is {self.max_staleness} beside rollout.mismatch.lag {self.rollout.mismatch.lag}; "
                "accepted: one of them above 0"
            )
        if self.sampling.capture == "off":
            raise ValueError("sampling.capture is 'off': training needs the recorded laws; set it to complete or head")
        if self.task.samples == 1 and self.trainer.advantage != "raw":
            raise ValueError(
                f"task.samples is 1 beside trainer.advantage {self.trainer.advantage!r}, which compares the responses "
                "of a prompt; accepted: more samples, or advantage raw"
            )
        for arm in self.arms:
            if arm.overrides:
                self.for_arm(arm)
        return self


def load(file: Path, overrides: Sequence[tuple[str, str]] = ()) -> ExperimentConfig:
    """The settings of a YAML file with dotted overrides, whose values are read as YAML.

    Raises ValueError, one line a problem: the key, its value, what is accepted, and for an unknown key the nearest.
    """
    if not file.is_file():
        raise ValueError(f"no file {file} in {Path.cwd()}; accepted: an experiment in YAML, see experiments/configs/")
    try:
        raw = _read(file.read_text())
        values = [(key, _read(value)) for key, value in overrides]
    except yaml.YAMLError as error:
        raise ValueError(f"{file} or an override is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds {type(raw).__name__}; accepted: settings as `key: value` lines")
    for key, value in values:
        _set(raw, key, value)
    try:
        return ExperimentConfig.model_validate({"name": file.stem, **raw})
    except ValidationError as error:
        raise ValueError(explain(error, ExperimentConfig)) from error


def dump(config: ExperimentConfig) -> str:
    """The resolved settings as YAML that `load` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def plan(config: ExperimentConfig) -> str:
    """What a run will do, in a few lines of comment."""
    task, updates = config.task, config.trainer.updates_per_rollout
    gpus = sum(side.workers * side.gpus_per_worker for side in (config.rollout, config.trainer))
    lines = [
        f"{len(config.arms)} arms x {len(config.seeds)} seeds, one after another: "
        + ", ".join(f"{arm.name} ({arm.kind})" for arm in config.arms),
        f"each: {config.steps} steps of {task.prompts} prompts x {task.samples} responses of at most "
        f"{task.max_new_tokens} tokens, {updates} updates and a handoff a step, {task.eval_problems} held-out problems",
        f"needs {config.cpus:g} CPU and {gpus:g} GPU at a time; writes to {config.run_dir.resolve()}",
    ]
    return "\n".join(f"# {line}" for line in lines)


def save(config: ExperimentConfig) -> ExperimentConfig:
    """Write run_dir/config.yaml and return the settings; beside an earlier run NAME becomes NAME-2, and so on."""
    config = next(run for run in numbered(config) if not run.run_dir.exists() or not any(run.run_dir.iterdir()))
    if config.run_dir.is_symlink():
        raise ValueError(
            f"{config.run_dir} is a link to {config.run_dir.readlink()}, and a run writes below output_dir alone; "
            "accepted: a folder, or none yet; remove the link or choose another name"
        )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(config.run_dir / CONFIG_FILE, dump(config))
    return config


def numbered(config: ExperimentConfig) -> Iterator[ExperimentConfig]:
    """The settings under NAME, NAME-2, NAME-3, ... up to the first whose folder does not exist."""
    for number in count(1):
        run = config if number == 1 else config.model_copy(update={"name": f"{config.name}-{number}"})
        yield run
        if not run.run_dir.exists():
            return


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        below = raw.setdefault(parent, {})
        if not isinstance(below, Mapping):
            raise ValueError(f"{key} cannot be set: {parent} is {below!r}, which has no keys below it")
        section = raw[parent] = dict(below)
        raw = section
    raw[last] = value


class _Yaml(yaml.SafeLoader):
    """YAML 1.2 where 1.1 surprises: `on` and `off` are words, `3e-4` is a number."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|false)\Z", re.IGNORECASE), list("tTfF"))
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?\Z|[-+]?\.(inf|nan)\Z", re.IGNORECASE)
_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _read(text: str) -> Any:
    return yaml.load(text, _Yaml)  # noqa: S506  a SafeLoader
