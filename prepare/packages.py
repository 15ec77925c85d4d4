"""Packages that only some commands need."""

import contextlib

from cli.errors import UserError, first_line


@contextlib.contextmanager
def needed(package: str, what: str):
    """Where a package is imported. UserError says that `what` needs it, if it is missing or broken."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = f"{what} needs the package {package}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f"{text}: pip install {package}.")
        raise UserError(f"{text}, which is broken here ({first_line(error)}): pip install --force-reinstall "
                        f"{package}.")
