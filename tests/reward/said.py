"""Trajectories that end with given words."""


def said(*texts, **more):
    return [{"messages": [{"role": "assistant", "content": text}], **more} for text in texts]
