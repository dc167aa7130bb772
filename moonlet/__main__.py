"""`python -m moonlet`, which is also what torchrun starts."""

from moonlet.cli.main import main

if __name__ == "__main__":
    main()
