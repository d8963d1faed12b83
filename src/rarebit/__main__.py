"""The command line: `rarebit` or `python -m rarebit`."""

import sys

from rarebit.errors import MissingExtraError, import_extra


def main() -> None:
    """Run the command line; say which extra is missing where one is."""
    try:
        for package in ("rich", "typer"):
            import_extra(package, "cli", "the command line")
    except MissingExtraError as missing:
        sys.stderr.write(f"rarebit: {missing}\n")
        sys.exit(2)
    from rarebit.cli.app import start

    start()


if __name__ == "__main__":
    main()
