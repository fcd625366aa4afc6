"""Keeps the names under which scripts of earlier versions import the reading of images and videos."""

from cepo.data.images import decoded_images, limited_size, listed, load_rgb, open_image, verify_image
from cepo.data.videos import load_video

__all__ = ["decoded_images", "limited_size", "listed", "load_rgb", "load_video", "open_image", "verify_image"]
