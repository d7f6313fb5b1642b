"""``python -m kvatlas``: the ``kvatlas`` command."""

from kvatlas.router.__main__ import main

if __name__ == "__main__":
    main()
