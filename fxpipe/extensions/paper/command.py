"""``fxpipe plan`` on the command line."""

from __future__ import annotations

import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from fxpipe.errors import InputError, told
from fxpipe.extensions.paper.cluster import Cluster
from fxpipe.extensions.paper.plan import plan


def add_plan(added: _SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = added.add_parser(
        "plan",
        help="rank the ways to train a model on a cluster that need not be here",
        description="Rank the ways to train a model on a cluster. Nothing runs on a device.",
    )
    add = parser.add_argument
    given = (
        "a function of a module that can be imported; called on the meta device, it returns the "
        "model and an example, or a dict with these and further arguments of fxpipe.plan"
    )
    add("--model", required=True, metavar="PACKAGE:FACTORY", help=given)
    given = "devices of a host, and how many such hosts: 8xH100/8 is 64 H100"
    add("--cluster", required=True, metavar="8xH100/8", help=given)
    add("--batch", required=True, type=int, metavar="N", help="samples of a batch")
    add("--keep", type=int, default=10, metavar="N", help="how many ways to show; by default 10")
    parser.set_defaults(run=show_plan)


def show_plan(given: Namespace) -> bool:
    """``fxpipe plan``: the table of a plan."""
    cluster = Cluster.parse(given.cluster)
    arguments = dict(made_by(given.model))
    model = arguments.pop("model")
    print(plan(model, cluster, batch=given.batch, keep=given.keep, **arguments))
    return True


def made_by(named: str) -> Mapping[str, Any]:
    """The arguments of a plan that a factory makes on the meta device.

    Raises:
        InputError: there is no such function, it fails, or it returns something else.
    """
    module, _, attribute = named.partition(":")
    if not attribute:
        raise InputError(f"--model is {named!r}; write package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as ``python -m`` has it
    try:
        factory = getattr(import_module(module), attribute)
        with torch.device("meta"):
            made = factory()
    except Exception as error:
        raise InputError(f"--model {named} cannot be made: {told(error)}") from error
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "example": made[1]}
    if not isinstance(made, Mapping) or not {"model", "example"} <= {*made}:
        raise InputError(
            f"--model {named} gives {type(made).__name__}; return the model and an example, "
            '(model, (x,)), or {"model": …, "example": …, "loss": …}'
        )
    return made
