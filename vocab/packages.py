"""Packages that only some commands need."""

import contextlib

from cli.errors import UserError, first_line


@contextlib.contextmanager
def needed(package: str, what: str):
    """A context in which to import a package. If the package is missing or broken, raises UserError that says
    `what` needs it.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        text = f"{what} needs the package {package}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f"{text}: pip install {package}.")
        raise UserError(f"{text}, which is broken here ({first_line(error)}): pip install --force-reinstall "
                        f"{package}.")
