"""Models from the Hugging Face Hub: names such as ``hf:ORG/NAME``, the file to take, its download, and what is cached.

``huggingface_hub`` does the talking and owns the cache; it is imported when a name is first looked up.
"""
