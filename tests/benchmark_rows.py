"""A row of each benchmark, written by hand with the columns that its authors publish."""

from __future__ import annotations

from typing import Any

PICTURE = {"bytes": b"picture", "path": None}
_IMAGES = dict.fromkeys(f"image_{number}" for number in range(1, 8))

DYNAMATH = {
    "id": "7", "question_id": "7-1", "question": "How long is AB?", "image": "images/7.png", "decoded_image": PICTURE,
    "ground_truth": "2.5", "answer_type": "float", "subject": "plane geometry", "knowledge_level": "high school",
}  # fmt: skip
HALLUSIONBENCH = {
    "category": "VD", "subcategory": "math", "visual_input": "1", "set_id": "3", "figure_id": "1", "sample_note": "",
    "question_id": "0", "question": "Are the lines parallel?", "gt_answer_details": "They are.", "gt_answer": "1",
    "filename": "./VD/math/3_1.png", "image": PICTURE,
}  # fmt: skip
LOGICVISTA = {"question": "Next? (A) up (B) down", "answer": "A, B", "image": PICTURE}
MATHVERSE = {
    "sample_index": "1", "problem_index": "1", "problem_version": "Text Lite",
    "question": "Find the angle.\nChoices:\nA:40°\nB:60°\nC:120°", "image": PICTURE, "answer": "B",
    "question_type": "multi-choice",
    "metadata": {"split": "testmini", "source": "GeoQA", "subject": "Plane Geometry", "subfield": "Angle"},
    "query_wo": "Answer directly.\nQuestion: Find the angle.", "query_cot": "First reason.\nQuestion: Find the angle.",
}  # fmt: skip
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
MMMU_PRO = {
    "id": "test_History_1", "question": "What shows <image 1>?", "options": str([f"event {n}" for n in range(10)]),
    "explanation": "?", **_IMAGES, "image_1": PICTURE, "img_type": "['Maps']", "answer": "J",
    "topic_difficulty": "Medium", "subject": "History",
}  # fmt: skip
MMMU_PRO_VISION = {
    "id": "test_Art_2", "image": PICTURE, "options": str([f"work {n}" for n in range(10)]), "answer": "C", "subject": "Art",
}  # fmt: skip
WEMATH = {
    "ID": "2steps_1", "split": "testmini", "knowledge concept": "Length", "question": "How long?",
    "option": "A. 3; B. 4;C. 5; D. No correct answer", "answer": "B", "image_path": PICTURE, "key": "2steps_1",
    "question number": 1, "knowledge concept description": "...",
}  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {
    "dynamath": DYNAMATH, "hallusionbench": HALLUSIONBENCH, "logicvista": LOGICVISTA, "mathverse": MATHVERSE,
    "mathvision": MATHVISION, "mathvista": MATHVISTA, "mmmu": MMMU, "mmmu_pro": MMMU_PRO,
    "mmmu_pro_vision": MMMU_PRO_VISION, "wemath": WEMATH,
}  # fmt: skip
