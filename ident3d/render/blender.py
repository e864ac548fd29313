"""The only module that imports bpy: build a scene from a spec once, then render pictures of it.

The material, the lights and the render settings rebuild the published scene (Zimmermann et al. 2021, appendix A.4) from
its numbers.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import bpy
import numpy as np
from mathutils import Matrix, Vector
from numpy.typing import NDArray
from PIL import Image

from ident3d.errors import RenderError, SpecError
from ident3d.mesh import load_patches, tessellate
from ident3d.render.quality import RenderSettings
from ident3d.scene import GroundSpec, LightSpec, MeshSpec, ObjectSpec, SceneParams, SceneSpec, Vec3

__all__ = ["DEVICES", "Renderer"]

DEVICES = ("OPTIX", "CUDA", "HIP", "METAL", "ONEAPI")
"""Kinds of GPU that Cycles knows, the fastest first."""


class Renderer:
    """One Blender scene, and pictures of it.

    A process holds one Blender, so a new renderer replaces the scene of an earlier one.

    Args:
        spec: the scene.
        mesh: the file of its mesh.
        settings: samples, denoiser and so on.
        resolution: the pictures' side in pixels.
        device: `auto`, `cpu` or one of DEVICES in lower case.
        threads: CPU threads.
        gpu: which of several GPUs of the kind to use, counted modulo their number.

    Attributes:
        device: what renders: `CPU` or one of DEVICES.
        gpus: how many of that kind there are; 0 for the CPU.
        model: the GPU's name, such as NVIDIA H200; empty for the CPU.
        warning: why the CPU renders where a GPU was looked for, or nothing.

    Raises:
        SpecError: a mesh that Blender cannot read or that holds no face.
        RenderError: a device that is not there.
    """

    def __init__(
        self,
        spec: SceneSpec,
        mesh: Path,
        settings: RenderSettings,
        resolution: int,
        device: str = "auto",
        threads: int = 1,
        gpu: int = 0,
    ) -> None:
        bpy.ops.wm.read_factory_settings(use_empty=True)
        self.scene = bpy.context.scene
        self.object = _add_object(spec, mesh)
        self.ground = _add_ground(spec.ground)
        self.lights = {name: _add_light(name, light) for name, light in spec.lights.items()}
        _add_camera(self.scene, spec)
        self.object_colour = _add_material(self.object, spec.object)
        self.ground_colour = _add_material(self.ground, spec.ground)
        _configure(self.scene, settings, resolution, threads)
        self._output = _Output(self.scene)
        self.device, self.gpus, self.model = _choose_device(self.scene, device, gpu)
        self.warning = ""
        if device == "auto":
            self._check_gpu(resolution)

    def _check_gpu(self, resolution: int) -> None:
        """Fall back on the CPU where the GPU that Blender names cannot render: an old driver shows no earlier."""
        if not self.gpus:
            # Only where there seems to be one: on most laptops this would be said at every call.
            if os.environ.get("CUDA_VISIBLE_DEVICES") or Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
                self.warning = "there is a GPU, but none that Cycles can use; rendering on the CPU"
            return
        render, samples = self.scene.render, self.scene.cycles.samples
        render.resolution_x = render.resolution_y = 8
        self.scene.cycles.samples = 1
        try:
            bpy.ops.render.render(write_still=True)
            self._output.read()
        except (RuntimeError, OSError) as error:
            self.warning = f"{self.model} ({self.device}) failed: {str(error).strip()}; rendering on the CPU"
            self.device, self.gpus, self.model = _choose_device(self.scene, "cpu", 0)
        render.resolution_x = render.resolution_y = resolution
        self.scene.cycles.samples = samples

    def render(self, params: SceneParams, seed: int) -> NDArray[np.uint8]:
        """One picture.

        Args:
            params: the scene's variable part.
            seed: the Cycles seed, in [0, 2^31).

        Returns:
            sRGB pixels, shape (H, W, 3).
        """
        self.object.location = params.object_location
        self.object.rotation_euler = params.object_rotation
        for socket in self.object_colour:
            socket.default_value = (*params.object_rgb, 1.0)
        for socket in self.ground_colour:
            socket.default_value = (*params.ground_rgb, 1.0)
        for name, light in params.lights.items():
            lamp = self.lights[name]
            lamp.data.color = light.rgb
            lamp.data.energy = light.power
            _place(lamp, light.location, light.aim)
        self.scene.cycles.seed = seed
        bpy.ops.render.render(write_still=True)
        return self._output.read()


def _place(thing: Any, location: Vec3, aim: Vec3) -> None:
    """Stand at a point and look at another: the pose that a Track-To constraint (track -Z, up Y) gives."""
    thing.location = location
    thing.rotation_euler = (Vector(aim) - Vector(location)).to_track_quat("-Z", "Y").to_euler()


def _link(name: str, data: Any) -> Any:
    thing = bpy.data.objects.new(name, data)
    bpy.context.scene.collection.objects.link(thing)
    return thing


def _add_object(spec: SceneSpec, path: Path) -> Any:
    if path.suffix.lower() == ".json":
        vertices, faces = tessellate(load_patches(path), spec.mesh.tessellation)
        mesh = bpy.data.meshes.new("object")
        corners = [list(dict.fromkeys(face)) for face in faces.tolist()]
        mesh.from_pydata(vertices.tolist(), [], corners)
        thing = _link("object", mesh)
    else:
        thing = _import_mesh(path)
    mesh = thing.data
    if not mesh.polygons:
        raise SpecError(f"mesh {path}: holds no face")
    mesh.transform(_mesh_matrix(spec.mesh, mesh))
    mesh.update()
    if spec.mesh.smooth:
        mesh.shade_smooth()
    else:
        mesh.shade_flat()
    thing.rotation_mode = "XYZ"
    return thing


def _import_mesh(path: Path) -> Any:
    """All objects of an .obj or .ply as one, in the file's own axes, without its materials."""
    try:
        if path.suffix.lower() == ".obj":
            bpy.ops.wm.obj_import(filepath=str(path), forward_axis="Y", up_axis="Z")
        else:
            bpy.ops.wm.ply_import(filepath=str(path), forward_axis="Y", up_axis="Z")
    except RuntimeError as error:
        raise SpecError(f"mesh {path}: Blender cannot read it: {error}") from None
    found = [thing for thing in bpy.context.scene.objects if thing.type == "MESH"]
    if not found:
        raise SpecError(f"mesh {path}: Blender finds no mesh in it")
    with bpy.context.temp_override(active_object=found[0], selected_editable_objects=found, object=found[0]):
        if len(found) > 1:
            bpy.ops.object.join()
    thing = found[0]
    thing.data.transform(thing.matrix_world)
    thing.matrix_world = Matrix.Identity(4)
    thing.data.materials.clear()
    return thing


def _mesh_matrix(spec: MeshSpec, mesh: Any) -> Any:
    turn = Matrix.Rotation(math.radians(spec.rotate_z_deg), 4, "Z")
    if spec.size is None:
        return Matrix.Translation(spec.translate) @ turn @ Matrix.Scale(spec.scale, 4)
    points = np.empty(3 * len(mesh.vertices), np.float32)
    mesh.vertices.foreach_get("co", points)
    low, high = points.reshape(-1, 3).min(axis=0), points.reshape(-1, 3).max(axis=0)
    extent = float((high - low).max())
    if not extent > 0 or not math.isfinite(extent):
        raise SpecError(f"mesh {spec.source}: its largest dimension is {extent}, so it cannot be scaled to a size")
    middle = Vector(((low + high) / -2).tolist())
    return turn @ Matrix.Scale(spec.size / extent, 4) @ Matrix.Translation(middle)


def _add_ground(spec: GroundSpec) -> Any:
    h = spec.size / 2
    mesh = bpy.data.meshes.new("ground")
    mesh.from_pydata([(-h, -h, 0), (h, -h, 0), (h, h, 0), (-h, h, 0)], [], [(0, 1, 2, 3)])
    mesh.update()
    ground = _link("ground", mesh)
    ground.location = (0, 0, spec.z)
    return ground


def _add_light(name: str, spec: LightSpec) -> Any:
    light = bpy.data.lights.new(name, spec.type.upper())
    light.energy = spec.power
    if spec.type == "area":
        light.shape = "SQUARE"
        light.size = spec.size
    elif spec.type == "sun":
        light.angle = spec.angle_rad
    else:
        light.shadow_soft_size = spec.radius
    if spec.type == "spot":
        light.spot_size = math.radians(spec.cone_deg)
        light.spot_blend = spec.blend
    return _link(name, light)


def _add_camera(scene: Any, spec: SceneSpec) -> None:
    data = bpy.data.cameras.new("camera")
    data.lens = spec.camera.focal_length_mm
    data.sensor_width = spec.camera.sensor_width_mm
    data.clip_start, data.clip_end = spec.camera.clip
    camera = _link("camera", data)
    _place(camera, spec.camera.location, spec.camera.look_at)
    scene.camera = camera


def _add_material(thing: Any, spec: ObjectSpec | GroundSpec) -> tuple[Any, ...]:
    """The published material "Rubber"; returns the two sockets that take its colour.

    Diffuse and sheen mixed by Fresnel(ior + 0.2), the result and a grey gloss mixed by Fresnel(ior).
    """
    material = bpy.data.materials.new("rubber")
    material.use_nodes = True
    tree = material.node_tree
    tree.nodes.clear()
    new, link = tree.nodes.new, tree.links.new
    diffuse = new("ShaderNodeBsdfDiffuse")
    diffuse.inputs["Roughness"].default_value = 0.0
    sheen = new("ShaderNodeBsdfSheen")
    sheen.distribution = "ASHIKHMIN"
    sheen.inputs["Roughness"].default_value = 0.6
    gloss = new("ShaderNodeBsdfAnisotropic")  # the node that the interface calls Glossy
    gloss.distribution = "BECKMANN"
    gloss.inputs["Color"].default_value = (0.8, 0.8, 0.8, 1.0)
    gloss.inputs["Roughness"].default_value = math.sqrt(spec.roughness)
    surface: Any = diffuse
    for extra, layer in ((0.2, sheen), (0.0, gloss)):
        fresnel, mix = new("ShaderNodeFresnel"), new("ShaderNodeMixShader")
        fresnel.inputs["IOR"].default_value = spec.ior + extra
        link(fresnel.outputs[0], mix.inputs[0])
        link(surface.outputs[0], mix.inputs[1])
        link(layer.outputs[0], mix.inputs[2])
        surface = mix
    link(surface.outputs[0], new("ShaderNodeOutputMaterial").inputs["Surface"])
    thing.data.materials.append(material)
    return diffuse.inputs["Color"], sheen.inputs["Color"]


def _configure(scene: Any, settings: RenderSettings, resolution: int, threads: int) -> None:
    scene.render.engine = "CYCLES"
    scene.world = None  # black
    cycles = scene.cycles
    cycles.samples = settings.samples
    cycles.use_adaptive_sampling = False
    cycles.use_light_tree = settings.light_tree
    cycles.max_bounces = 0  # direct light only, as published
    cycles.transparent_max_bounces = 8
    cycles.blur_glossy = 2.0
    cycles.pixel_filter_type = "BLACKMAN_HARRIS"
    cycles.filter_width = 1.5
    cycles.use_denoising = True
    cycles.denoiser = "OPENIMAGEDENOISE"
    cycles.denoising_input_passes = settings.denoise_passes
    cycles.denoising_prefilter = settings.denoise_prefilter
    cycles.denoising_quality = settings.denoise_quality
    render = scene.render
    # Persistent data keeps the first picture's seed in force for all that follow: pictures would depend on their order.
    render.use_persistent_data = False
    render.use_compositing = False
    render.use_sequencer = False
    render.dither_intensity = settings.dither
    render.resolution_x = render.resolution_y = resolution
    render.resolution_percentage = 100
    render.threads_mode = "FIXED"
    render.threads = threads
    scene.display_settings.display_device = "sRGB"
    scene.view_settings.view_transform = "Standard"
    scene.view_settings.look = "None"


def _choose_device(scene: Any, wanted: str, gpu: int) -> tuple[str, int, str]:
    """Switch to the wanted device, or for `auto` to the fastest kind of GPU, or to the CPU where there is none.

    Returns the kind, how many GPUs of it there are, and the chosen one's name.
    """
    scene.cycles.device = "CPU"
    scene.cycles.denoising_use_gpu = False
    if wanted == "cpu":
        return "CPU", 0, ""
    preferences = bpy.context.preferences.addons["cycles"].preferences
    for kind in DEVICES if wanted == "auto" else (wanted.upper(),):
        found = _gpus(preferences, kind)
        if found:
            for i, device in enumerate(found):
                device.use = i == gpu % len(found)
            scene.cycles.device = "GPU"
            scene.cycles.denoising_use_gpu = True
            return kind, len(found), found[gpu % len(found)].name
    if wanted == "auto":
        return "CPU", 0, ""
    raise RenderError(f"device {wanted!r}: Blender finds none on this machine; use --device auto or --device cpu")


def _gpus(preferences: Any, kind: str) -> list[Any]:
    try:
        preferences.compute_device_type = kind
        devices = preferences.get_devices_for_type(kind)
    except (TypeError, ValueError):
        # This build of Blender was made without that kind.
        return []
    for device in devices:
        device.use = False
    return [device for device in devices if device.type == kind]


class _Output:
    """Where Blender puts a picture, and how it is read back.

    Blender keeps no pixels of a final render for Python, so it writes an uncompressed file. On Linux that file is
    memory without a name, which no kill can leave behind; elsewhere a temporary file.
    """

    def __init__(self, scene: Any) -> None:
        if hasattr(os, "memfd_create"):
            self.path = f"/proc/self/fd/{os.memfd_create('picture')}"
        else:
            handle, self.path = tempfile.mkstemp(suffix=".bmp")
            os.close(handle)
        scene.render.use_file_extension = False
        scene.render.filepath = self.path
        scene.render.image_settings.file_format = "BMP"
        scene.render.image_settings.color_mode = "RGB"

    def read(self) -> NDArray[np.uint8]:
        with open(self.path, "rb") as file, contextlib.closing(io.BytesIO(file.read())) as data:
            return np.array(Image.open(data).convert("RGB"))
