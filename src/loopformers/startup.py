"""What a command needs before anything else of this package is imported; imports nothing but what Python has loaded itself."""

import os
import sys

__all__ = ["silence_early_interrupts"]


def silence_early_interrupts() -> None:
    """Have Ctrl-C during the imports of a command print one line in the place of a traceback.

    Imports take some tens of milliseconds before `loopformers.boundary` can catch anything. The package calls this in the
    first line of its import, where it is a no-op unless the process is a command of ours: programs that import the package
    keep their own hook. Python then ends the process by SIGINT, which shells see as exit code 130.
    """
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if program not in ("loopformers", "-m"):  # sys.argv[0] is "-m" while a package is imported for `python -m`
        return
    before = sys.excepthook

    def hook(kind, error, traceback):  # type: ignore[no-untyped-def]  # typing is not imported yet
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        else:
            before(kind, error, traceback)

    sys.excepthook = hook
