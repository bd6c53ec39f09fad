"""`python -m sglang.plan --model-path DIR --gpus 8 --gpu rtx-pro-6000`"""

import sys

from sglang.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
