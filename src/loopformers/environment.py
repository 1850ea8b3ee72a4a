"""The environment variables of this package, in one place, so that a misspelt one can be told from one of another program.

Beside these, every field of a recipe has a variable, `LOOPFORMERS_SECTION__FIELD` (see `training.recipe_file`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from loopformers.errors import ConfigError

__all__ = ["CONFIG", "DEBUG", "IMPORT", "PREFIX", "VARIABLES", "check_variables"]

PREFIX = "LOOPFORMERS_"

CONFIG = "LOOPFORMERS_CONFIG"
DEBUG = "LOOPFORMERS_DEBUG"
IMPORT = "LOOPFORMERS_IMPORT"

VARIABLES: Mapping[str, str] = {
    CONFIG: "recipe that `train` and `plan` use if none is given",
    DEBUG: "1: a command that fails shows the traceback",
    IMPORT: "modules that commands import first, separated by commas",
}
"""What each variable means, except for those of recipe fields."""


def check_variables(environ: Mapping[str, str], fields: Iterable[str]) -> None:
    """Refuse variables of our prefix that nothing reads and that look like one of ours.

    With two underscores (`LOOPFORMERS_MODLE__NUM_LOOPS`) a variable can only be meant as a field of a recipe. Without them
    it may be a user's own (`LOOPFORMERS_HOME`), and is refused only where its name is near one of ours.

    Args:
        environ: The environment.
        fields: Every variable that names a field or a section of a recipe.

    Raises:
        ConfigError: A variable without effect; the text has the nearest name.
    """
    known = {*VARIABLES, *fields}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known:
            continue
        is_field = "__" in variable
        name = variable.removeprefix(PREFIX)[:100].upper()
        rivals = {other.removeprefix(PREFIX) for other in known if ("__" in other) == is_field}
        near = difflib.get_close_matches(name, rivals, n=1, cutoff=0.6 if is_field else 0.75)
        if is_field or near:
            hint = f"did you mean {PREFIX}{near[0]}? Correct" if near else "correct"
            raise ConfigError(
                f"environment variable {variable[:120]} has no effect, since nothing reads a variable of that name; {hint} it, "
                "or unset it"
            )
