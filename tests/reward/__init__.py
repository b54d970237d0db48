"""What tests of rewards share: trajectories of one completion each."""


def completions(*texts, **more):
    return [{"messages": [{"role": "assistant", "content": text}], **more} for text in texts]
