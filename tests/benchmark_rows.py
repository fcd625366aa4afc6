"""A row of each benchmark, written by hand with the columns that its authors publish."""

from __future__ import annotations

from typing import Any

PICTURE = {"bytes": b"picture", "path": None}
_IMAGES = dict.fromkeys(f"image_{number}" for number in range(1, 8))

DYNAMATH = {
    "id": "7", "question_id": "7-1", "question": "How long is AB?", "image": "images/7.png", "decoded_image": PICTURE,
    "ground_truth": "2.5", "answer_type": "float", "subject": "plane geometry", "knowledge_level": "high school",
}  # fmt: skip
LOGICVISTA = {"question": "Next? (A) up (B) down", "answer": "A, B", "image": PICTURE}
MATHVISION = {
    "id": "4", "question": "Which picture? <image1>", "options": ["A", "B", "C", "D", "E"], "image": "images/4.jpg",
    "decoded_image": PICTURE, "answer": "D", "solution": None, "level": 3, "subject": "logic",
}  # fmt: skip
MATHVISTA = {
    "pid": "1", "question": "How far?", "image": "images/1.jpg", "decoded_image": PICTURE, "choices": None, "unit": None,
    "precision": 1.0, "answer": "1.2", "question_type": "free_form", "answer_type": "float",
    "metadata": {"task": "textbook question answering", "grade": "college", "skills": ["algebraic", "scientific"]},
    "query": "Hint: ...",
}  # fmt: skip
MMMU = {
    "id": "validation_Biology_1", "question": "Which of <image 1>?", "options": "['leaf', 'root']", "explanation": "",
    **_IMAGES, "image_1": PICTURE, "img_type": "['Trees']", "answer": "B", "topic_difficulty": "Easy",
    "question_type": "multiple-choice", "subfield": "Botany",
}  # fmt: skip
WEMATH = {
    "ID": "2steps_1", "split": "testmini", "knowledge concept": "Length", "question": "How long?",
    "option": "A. 3; B. 4;C. 5; D. No correct answer", "answer": "B", "image_path": PICTURE, "key": "2steps_1",
    "question number": 1, "knowledge concept description": "...",
}  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {
    "dynamath": DYNAMATH,
    "logicvista": LOGICVISTA,
    "mathvision": MATHVISION,
    "mathvista": MATHVISTA,
    "mmmu": MMMU,
    "wemath": WEMATH,
}
