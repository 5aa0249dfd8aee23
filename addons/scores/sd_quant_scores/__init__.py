"""Scores for comparison with published results, not with full precision, by networks whose weights the user provides.

Entries of ``sd_quant.metrics.Score``, registered as entry points; the code of a score is imported at its first call.
"""

from sd_quant.metrics import Against, Score

HERE = "sd_quant_scores"
PICKSCORE = Score(
    "pickscore", "PickScore", Against.PROMPTS, f"{HERE}.preference:pick_score", "{:.2f}",
    weights="a folder with the files of yuvalkirstain/PickScore_v1 of Hugging Face (model.safetensors has 3.94 GB; no "
    "licence is stated)",
)  # fmt: skip
HPS = Score(
    "hps", "HPSv2", Against.PROMPTS, f"{HERE}.preference:hps", "{:.2f}",
    weights="HPS_v2.1_compressed.pt or HPS_v2_compressed.pt of xswu/HPSv2 of Hugging Face (1.97 GB, Apache-2.0)",
)  # fmt: skip
IMAGE_REWARD = Score(
    "image_reward", "ImageReward", Against.PROMPTS, f"{HERE}.image_reward:image_reward", "{:.3f}",
    weights="a folder with ImageReward.pt of THUDM/ImageReward (1.79 GB, Apache-2.0) and vocab.txt of "
    "bert-base-uncased, both of Hugging Face",
)  # fmt: skip
DINO = Score(
    "dino_distance", "DINOv2 distance", Against.REFERENCE, f"{HERE}.dino:dino_distance", more_is_better=False,
    least=0, most=2,
    weights="a folder with the files of facebook/dinov2-base of Hugging Face (model.safetensors has 346 MB; "
    "Apache-2.0), or of another DINOv2",
)  # fmt: skip
OCR = Score(
    "ocr", "text read", Against.PROMPTS, f"{HERE}.ocr:ocr", "{:.3f}", least=0, most=1, check=f"{HERE}.ocr:reader"
)
