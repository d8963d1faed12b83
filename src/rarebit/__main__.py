"""The command line: `rarebit` or `python -m rarebit`."""

import sys


def main() -> None:
    """Run the command line; say which extra is missing where one is."""
    try:
        import rich  # noqa: F401  # imported here, so that its absence is one clear line
        import typer  # noqa: F401  # likewise
    except ImportError as error:
        from rarebit.errors import MissingExtraError

        missing = MissingExtraError(str(error.name), "cli", "the command line")
        sys.stderr.write(f"rarebit: {missing}\n")
        sys.exit(2)
    from rarebit.cli.app import start

    start()


if __name__ == "__main__":
    main()
