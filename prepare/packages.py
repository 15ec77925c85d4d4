"""Packages that only some commands need."""

import importlib

from data import UserError, first_line


def require(module: str, what: str):
    """Imports from a package. UserError says that `what` needs it, if it is missing or broken."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        package = module.partition(".")[0]
        text = f"{what} needs the package {package}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f"{text}: pip install {package}.")
        raise UserError(f"{text}, which is broken here ({first_line(error)}): pip install --force-reinstall "
                        f"{package}.")
