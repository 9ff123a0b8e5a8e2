"""The adapter's settings as Miles carries them: arguments named `sc_...`, set by flags or by a YAML file."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from miles_ext.capability import ArmKind
from miles_ext.sampling import FilterOrder, SamplingSpec
from miles_ext.score_centering import Centering, EstimatorConfig, Mode

PREFIX = "sc_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """mode, centering, tis_clip, mis_low, mis_high, rho_max: see `miles_ext.score_centering.EstimatorConfig`.

    arm: what the engines decode with; anything but `regular` has a draft, which stays private to the engines.
    capture: `auto` records complete supports beside --rollout-top-k or --rollout-top-p, else heads of head_size.
    max_support, filter_order: see `miles_ext.sampling.SamplingSpec`; the order is the one that the engines were
    started with.
    force_target: send weights to the target model only, whatever Miles would choose.
    """

    mode: Mode = "none"
    centering: Centering = "on"
    tis_clip: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    rho_max: float = 10.0
    arm: ArmKind = "regular"
    capture: Literal["auto", "complete", "head"] = "auto"
    head_size: int = 32
    max_support: int = 4096
    filter_order: FilterOrder = "top_k_first"
    force_target: bool = False

    @property
    def estimator(self) -> EstimatorConfig:
        return EstimatorConfig(
            mode=self.mode, centering=self.centering, tis_clip=self.tis_clip,
            mis_low=self.mis_low, mis_high=self.mis_high, rho_max=self.rho_max,
        )  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """One flag a setting: --sc-mode, --sc-tis-clip, ..."""
    group = parser.add_argument_group("score centering (miles_ext)")
    hints = get_type_hints(Settings)
    for field in fields(Settings):
        flag, default, hint = f"--{PREFIX}{field.name}".replace("_", "-"), field.default, hints[field.name]
        if hint is bool:
            group.add_argument(flag, action="store_true", default=default)
        elif choices := get_args(hint):
            group.add_argument(flag, choices=choices, default=default)
        else:
            group.add_argument(flag, type=hint, default=default)


def settings_of(args: Namespace) -> Settings:
    """The settings among Miles' arguments. Raises ValueError for an unknown name, a wrong type or value."""
    given = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
    hints = get_type_hints(Settings)
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1, 0.0)
            raise ValueError(f"unknown setting {PREFIX}{name}; did you mean {PREFIX}{near[0]}?")
        given[name] = _read(name, value, hints[name])
    settings = Settings(**given)
    _ = settings.estimator  # checks the numbers that belong together
    return settings


def _read(name: str, value: Any, hint: Any) -> Any:
    choices = get_args(hint)
    if choices and isinstance(value, bool):
        value = "on" if value else "off"  # YAML 1.1 reads the words on and off as booleans
    if choices and value not in choices:
        raise ValueError(f"{PREFIX}{name} is {value!r}; accepted: {', '.join(choices)}")
    kinds = {bool: bool, int: int, float: (int, float)}.get(hint, str)
    if not isinstance(value, kinds) or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{PREFIX}{name} is {value!r}; accepted: {'true or false' if hint is bool else 'a number'}")
    return float(value) if hint is float else value


def spec_of(args: Namespace) -> SamplingSpec:
    """The law that Miles' rollout samples from and what is recorded of it. ValueError where it cannot be recorded."""
    settings = settings_of(args)
    filters = {"top_k": max(args.rollout_top_k, 0), "top_p": float(args.rollout_top_p)}
    filtered = filters["top_k"] > 0 or filters["top_p"] < 1
    return SamplingSpec(
        temperature=float(args.rollout_temperature),
        **filters,
        filter_order=settings.filter_order,
        capture=("complete" if filtered else "head") if settings.capture == "auto" else settings.capture,
        head_size=settings.head_size,
        max_support=settings.max_support,
    )
