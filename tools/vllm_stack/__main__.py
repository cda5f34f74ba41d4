"""``python -m vllm_stack``."""

from vllm_stack.cli import main

if __name__ == "__main__":
    main()
