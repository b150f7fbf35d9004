"""`python -m restorekv`, and thereby `accelerate launch -m restorekv train`."""

from restorekv.cli import main

if __name__ == "__main__":
    main()
