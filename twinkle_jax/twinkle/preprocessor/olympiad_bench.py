"""OlympiadBench: problems of mathematics and physics, of which the text alone can be read here."""

from twinkle_jax.data import Row, Trajectory
from twinkle_jax.twinkle.preprocessor.base import Preprocessor
from twinkle_jax.twinkle.preprocessor.llm import conversation

_SYSTEM = {
    "zh": (
        "你是一个专业的数学和物理解题助手。请仔细分析题目，"
        "逐步推理解答，并将最终答案用 \\boxed{} 格式给出。"
        "如果有多个答案，请用逗号分隔。"
    ),
    "en": (
        "You are a professional math and physics problem solver. Analyze the problem carefully, "
        "solve it step by step, and provide your final answer in \\boxed{} format. If there are "
        "multiple answers, separate them with commas."
    ),
}


class OlympiadBenchProcessor(Preprocessor):
    """`context` and `question` as a prompt; `final_answer` as `ground_truth`.

    Args:
        system: the system prompt; None for Twinkle's in the language.
        language: `zh` or `en`.

    Raises:
        ValueError: for a problem with images, from `preprocess`: policies read text only.
    """

    def __init__(self, system: str | None = None, language: str = "zh") -> None:
        self.system = _SYSTEM[language] if system is None else system

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt."""
        if any(row.get(f"image_{i}") is not None for i in range(1, 10)):
            raise ValueError(
                "a problem must have no images, which policies here do not read: take the subsets "
                "OE_TO_…; see docs/from_twinkle.md"
            )
        context, question = row.get("context"), row.get("question", "")
        prompt = f"背景信息：{context}\n\n{question}" if context else question
        answer = row.get("final_answer") or ""
        answers = answer if isinstance(answer, list) else [answer]
        truth = ", ".join(str(x).strip() for x in answers if x)
        return {
            "messages": conversation(("system", self.system), ("user", prompt)),
            "user_data": [("ground_truth", truth)],
        }
