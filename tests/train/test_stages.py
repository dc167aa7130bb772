"""Which stage a step belongs to."""

from typing import Any

from moonlet.train.stages import Place, find_place, total_tokens


def test_places_count_steps_and_tokens(recipe: Any):
    stages = [
        {"name": "a", "seq_len": 32, "tokens": 640, "batch_tokens": 64, "mixture": {"text": 1}},
        {"name": "b", "seq_len": 64, "tokens": 100, "batch_tokens": 128, "mixture": {"text": 1}},
        {"name": "c", "seq_len": 64, "tokens": 256, "batch_tokens": 128, "mixture": {"text": 1}},
    ]
    config = recipe(stages=stages)
    assert config.num_steps == 13
    assert find_place(config, 0) == Place(0, 0, 0)
    assert find_place(config, 9) == Place(0, 9, 576)
    assert find_place(config, 10) == Place(1, 0, 640)
    assert find_place(config, 11) == Place(2, 0, 768)
    assert find_place(config, 13) == Place(2, 2, 1024)
    assert total_tokens(config) == 1024
