"""The families, by transformers' `model_type`, whose tiny random models the tests prove under random schedules.

Not a condition: what passes the checks of `coverage` and `selfcheck` loads, with one line in the log if it isn't here.
"""

TESTED = frozenset({
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3", "granite", "glm4",
    "cohere", "cohere2", "exaone4", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "gemma3_text", "arcee", "qwen3_moe",
    "qwen2_moe", "mixtral", "olmoe", "flex_olmo", "granitemoe", "glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2",
    "hy_v3", "solar_open",
})  # fmt: skip
