"""Walking silhouettes: a synthetic stand-in for KITTI Masks, whose latents are exact by construction.

Klindt et al. 2021 (Towards Nonlinear Disentanglement in Natural Data with Temporal Sparse Coding) cut masks of
pedestrians, 64 x 64 pixels, 0.05 s apart, from videos of a driving car, and measured each mask's centre of mass and
area. Here a figure walks on a plane before that car's camera, and the latents are measured on the masks in the same
way. Nothing of this is natural data: whatever shows it must say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Integer, UInt8
from scipy.special import log_ndtr  # type: ignore[import-untyped]

from ident3d.checks import whole
from ident3d.datasets.serving import Array
from ident3d.errors import SpecError

__all__ = ["FRAMES", "SEQUENCES", "SIDE", "make_silhouettes", "measure"]

SIDE = 64
"""Pixels of a mask's side."""
SEQUENCES, FRAMES = 500, 60
MAX_BYTES = 16 * 2**30

# KITTI's colour camera (Geiger et al. 2013: focal length 721.5 px, horizon near row 173 of 375, 1.65 m above the road),
# with its 375 rows brought to 64 as for the published masks.
FOCAL_PX = 721.5 * SIDE / 375
HORIZON_ROW = 172.9 * SIDE / 375
CAMERA_M = 1.65

DEPTH_M = (5.0, 13.0)
COLUMN_PX = (4.0, 60.0)
PITCH_RAD = (-0.04, 0.04)

# Mean absolute steps in 0.05 s: the walker's, 1 m/s across the line of sight and 0.6 m/s along it, and the car's, which
# adds up to 2.8 m/s along it and bumps that pitch the camera. Some cars stand and some drive: so the walkers differ.
LATERAL_STEP_M, DEPTH_STEP_M = 0.05, 0.03
DRIVE_STEP_M, DRIVE_STEP_RAD = 0.14, 0.004
MEMORY = 0.9
"""Correlation of one step's underlying normal with the next one's: who walks, goes on walking."""
STRIDE = 0.8
"""Way of a whole cycle of the gait, in body heights."""

# Lengths and radii in body heights.
HIP, SHOULDER, HEAD = 0.52, 0.81, 0.925
THIGH, SHANK, FOOT, ANKLE = 0.245, 0.235, 0.09, 0.03
UPPER_ARM, FOREARM = 0.17, 0.17


@dataclass(frozen=True)
class Track:
    """Where a walker is in each of its T frames; float64 (T,) but for the constants.

    Attributes:
        depth: distance from the camera in metres.
        column: of the body's axis in the mask, in pixels.
        pitch: how far the camera looks up, in radians.
        phase: of the gait, in radians.
        heading: angle between the way and the picture's plane in radians; beyond a quarter turn it goes to the left.
        height: of the walker in metres.
        girth: its thickness over that of the plain figure.
    """

    depth: Array
    column: Array
    pitch: Array
    phase: Array
    heading: float
    height: float
    girth: float


def _steps(rng: np.random.Generator, count: int, scale: float) -> Array:
    """Laplace steps of mean absolute value `scale`, correlated in time: a normal AR(1) through both laws' quantiles."""
    normal = rng.standard_normal(count)
    for t in range(1, count):
        normal[t] = MEMORY * normal[t - 1] + math.sqrt(1 - MEMORY**2) * normal[t]
    sizes: Array = -scale * np.sign(normal) * (math.log(2) + log_ndtr(-np.abs(normal)))
    return sizes


def _walk(rng: np.random.Generator, steps: Array, bounds: tuple[float, float]) -> Array:
    """The way of these steps from a uniform start, reflected at the bounds; shape (len(steps) + 1,)."""
    low, high = bounds
    way = rng.uniform(0, high - low) + np.concatenate([[0.0], np.cumsum(steps)])
    folded: Array = high - np.abs(way % (2 * (high - low)) - (high - low))
    return folded


def make_track(rng: np.random.Generator, frames: int) -> Track:
    """Draw a walker and its way.

    Args:
        rng: what it is drawn from.
        frames: T, at least 2.
    """
    lateral = _steps(rng, frames - 1, LATERAL_STEP_M)
    drive = float(rng.uniform(0.0, 1.0))
    depth = _walk(rng, _steps(rng, frames - 1, DEPTH_STEP_M + DRIVE_STEP_M * drive), DEPTH_M)
    column = _walk(rng, FOCAL_PX * lateral / depth[:-1], COLUMN_PX)
    pitch = _walk(rng, _steps(rng, frames - 1, DRIVE_STEP_RAD * drive), PITCH_RAD)
    height = float(np.clip(rng.normal(1.7, 0.12), 1.3, 2.0))
    slant = float(rng.uniform(-1.0, 1.0))
    # Who does not move sideways stands still, so that the gait adds no motion where there is none.
    turned = np.minimum(2 * math.pi * np.abs(lateral) / math.cos(slant) / (STRIDE * height), 0.8)
    phase = rng.uniform(0, 2 * math.pi) + np.concatenate([[0.0], np.cumsum(turned)])
    heading = slant if column[-1] > column[0] else math.pi - slant
    return Track(depth, column, pitch, phase, heading, height, float(rng.uniform(0.9, 1.25)))


Joint = tuple[Any, Any, Any]
"""A point of the body: forwards, to its left, upwards, in body heights; each a number or an array (T,)."""


def _body(phase: Array) -> list[tuple[Joint, Joint, float, float]]:
    """The parts of the body as (joint, joint, radius, radius), in body heights."""
    parts: list[tuple[Joint, Joint, float, float]] = []
    legs = []
    for side in (0.0, math.pi):
        thigh = 0.42 * np.sin(phase + side)
        shank = thigh - 0.12 - 0.75 * np.maximum(np.cos(phase + side + 0.3), 0) ** 2
        legs.append((thigh, shank, THIGH * np.cos(thigh) + SHANK * np.cos(shank) + ANKLE))
    # The longer leg stands on the ground; the foot's roll, which is not drawn, takes up half of the hip's rise.
    hip = (HIP + np.maximum(legs[0][2], legs[1][2])) / 2
    rise = hip - HIP
    for across, (thigh, shank, _) in zip((0.05, -0.05), legs, strict=True):
        knee = (THIGH * np.sin(thigh), across, hip - THIGH * np.cos(thigh))
        ankle = (knee[0] + SHANK * np.sin(shank), across, knee[2] - SHANK * np.cos(shank))
        toe = (ankle[0] + FOOT * np.cos(shank), across, ankle[2] + FOOT * np.sin(shank))
        parts += [((0.0, across, hip), knee, 0.055, 0.042), (knee, ankle, 0.042, 0.028), (ankle, toe, 0.026, 0.02)]
    for across, side in ((0.125, math.pi), (-0.125, 0.0)):
        swing = 0.4 * np.sin(phase + side)
        shoulder = (0.0, across, SHOULDER + rise)
        elbow = (UPPER_ARM * np.sin(swing), 1.15 * across, shoulder[2] - UPPER_ARM * np.cos(swing))
        hand = (elbow[0] + FOREARM * np.sin(swing + 0.35), 1.1 * across, elbow[2] - FOREARM * np.cos(swing + 0.35))
        parts += [(shoulder, elbow, 0.036, 0.028), (elbow, hand, 0.028, 0.022)]
        parts += [((0.0, 0.6 * across, SHOULDER - 0.03 + rise), (0.0, 0.4 * across, hip), 0.07, 0.065)]
    parts += [((0.0, 0.0, SHOULDER - 0.03 + rise), (0.0, 0.0, hip), 0.085, 0.075)]
    parts += [((0.01, 0.0, HEAD - 0.02 + rise), (0.015, 0.0, HEAD + 0.015 + rise), 0.052, 0.058)]
    return parts


def _project(track: Track, joint: Joint) -> tuple[Array, Array, Array]:
    """Column, row and pixels a metre of a joint, each (T,), through a pinhole."""
    forwards, left, up = (track.height * np.asarray(part) for part in joint)
    aside = forwards * math.cos(track.heading) - left * math.sin(track.heading)
    scale = FOCAL_PX / (track.depth + forwards * math.sin(track.heading) + left * math.cos(track.heading))
    return track.column + scale * aside, HORIZON_ROW + FOCAL_PX * track.pitch + scale * (CAMERA_M - up), scale


def draw(track: Track) -> Bool[Array, "frames 64 64"]:
    """A walker's masks, bool (T, 64, 64): the pixels whose centre lies in a part of the body."""
    ends = []
    for first, last, *radii in _body(track.phase):
        for joint, radius in zip((first, last), radii, strict=True):
            column, row, scale = _project(track, joint)
            ends.append([column, row, scale * radius * track.height * track.girth])
    points = np.array(ends)  # (2 parts, 3, T)
    low = np.floor((points[:, :2] - points[:, 2:]).min(0)).astype(np.int64)
    high = np.ceil((points[:, :2] + points[:, 2:]).max(0)).astype(np.int64)
    # Within the box that each frame's figure fills: a tenth of the picture.
    width, height = ((high - low).max(1) + 1).tolist()
    points[:, :2] -= low
    points = points.astype(np.float32)
    x = np.arange(width, dtype=np.float32)[None, None, :]
    y = np.arange(height, dtype=np.float32)[None, :, None]
    box = np.zeros((len(track.depth), height, width), bool)
    for first, last in zip(points[::2, :, :, None, None], points[1::2, :, :, None, None], strict=True):
        along, down, wider = last - first
        across, below = x - first[0], y - first[1]
        share = np.clip((across * along + below * down) / np.maximum(along**2 + down**2, 1e-6), 0, 1)
        box |= (across - share * along) ** 2 + (below - share * down) ** 2 <= (first[2] + share * wider) ** 2
    return _crop(box, low)


def _crop(box: Bool[Array, "frames height width"], low: Integer[Array, "2 frames"]) -> Bool[Array, "frames 64 64"]:
    """Boxes whose corners lie at columns low[0] and rows low[1] of the masks, as masks."""
    frames, height, width = box.shape
    # A margin as wide as a box takes what the picture's edge cuts off.
    margin = max(height, width)
    corners = np.clip(low + margin, 0, SIDE + margin)
    canvas = np.zeros((frames, SIDE + 2 * margin, SIDE + 2 * margin), bool)
    for picture, part, (column, row) in zip(canvas, box, corners.T.tolist(), strict=True):
        picture[row : row + height, column : column + width] = part
    return np.ascontiguousarray(canvas[:, margin : margin + SIDE, margin : margin + SIDE])


def measure(masks: Bool[Array, "frames 64 64"] | UInt8[Array, "frames 64 64"]) -> Float32[Array, "frames 3"]:
    """What is known of masks: centre of mass down and to the right, and area, as Klindt et al. 2021 measured them.

    Args:
        masks: (T, 64, 64), bool or 0 and 1; none of them empty.

    Returns:
        float32 (T, 3): row and column of the centre of mass in pixels, where the first pixel's centre is at 0, and the
        number of pixels.
    """
    pixels = np.arange(SIDE, dtype=np.float64)
    down, across = masks.sum(2, dtype=np.int64), masks.sum(1, dtype=np.int64)
    area = down.sum(1)
    latents: Array = np.stack([down @ pixels / area, across @ pixels / area, area], axis=1)
    return latents.astype(np.float32)


def make_silhouettes(
    sequences: int = SEQUENCES, seed: int = 0, frames: int = FRAMES
) -> tuple[list[Array], list[Array]]:
    """Walking silhouettes in the structure of KITTI Masks: SYNTHETIC, and to be called so wherever they are shown.

    A figure of 1.3 to 2 m walks between 5 and 13 m before a camera 1.65 m above the ground. Its depth, its place
    across the line of sight and the camera's pitch each move by Laplace steps of 0.05 s, sparse as Klindt et al. 2021
    found natural motion to be, and are reflected at the edges of the view; each step resembles the one before it.
    Sequence k is a function of (seed, k, frames) alone.

    Args:
        sequences: how many, at least 1.
        seed: what they are drawn from, 0 or more.
        frames: of the longest sequence, at least 2; lengths are uniform from a quarter of it, but at least 2.

    Returns:
        Masks, bool (T, 64, 64), and latents, float32 (T, 3), of each sequence: see `measure`. No mask is empty.

    Raises:
        SpecError: a value out of range, or more frames than 16 GiB hold.
    """
    sequences, seed, frames = whole("sequences", sequences, 1), whole("seed", seed, 0), whole("frames", frames, 2)
    if sequences * frames * SIDE**2 > MAX_BYTES:
        raise SpecError(f"sequences = {sequences}, frames = {frames}: expected at most {MAX_BYTES >> 30} GiB of masks")
    masks = []
    for number in range(sequences):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
        length = int(rng.integers(max(2, frames // 4), frames + 1))
        masks.append(draw(make_track(rng, length)))
    return masks, [measure(sequence) for sequence in masks]
