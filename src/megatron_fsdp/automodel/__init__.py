"""Strategy configurations, meshes and managers for models of Hugging Face transformers."""
