"""A quantized model in other tools' formats: ``python hand_over.py --help``."""

from sd_quant.commands.hand_over import main

if __name__ == "__main__":
    main()
