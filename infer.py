"""Images and latency from exported engines: ``python infer.py --help``."""

from sd_quant.commands.infer import main

if __name__ == "__main__":
    main()
