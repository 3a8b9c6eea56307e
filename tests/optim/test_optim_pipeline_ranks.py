"""One norm for clipping over the stages of a pipeline, which have different parameters."""

import pytest
import torch.distributed as dist
from optim_runs import parameters

import rank_programs
from penstock import ConfigError
from penstock.optim import FlashAdamW


def test_stages_clip_by_the_norm_of_all_of_them_if_they_are_told_the_group(disk_path):
    """And by that of the step before if they update in backward; one without a gradient takes part."""
    rank_programs.run(
        disk_path,
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        CLIP, PARTS = 0.05, 4

        class Stage:
            def __init__(self):
                torch.manual_seed(0)
                sizes = (20, 130), (130, 30), (30, 40), (40, 5)
                layers = [nn.Linear(*each) for each in sizes]
                self.model = nn.Sequential(*layers[2 * rank : 2 * rank + 2])
                stage = PipelineStage(self.model, rank, world, torch.device("cpu"))
                # gradients that are used in backward must not be divided after it
                self.schedule = Schedule1F1B(
                    stage, PARTS, loss_fn=nn.functional.mse_loss, scale_grads=False
                )

            def run(self, step):
                random = torch.Generator().manual_seed(step)
                inputs, target = torch.randn(8, 20, generator=random), torch.randn(8, 5, generator=random)
                last = {"target": target} if rank == world - 1 else {}
                self.schedule.step(*((inputs,) if rank == 0 else ()), **last)

        def total_norm(stage):
            owners = stage.model.parameters()
            gradients = [each.grad + 0 for each in owners if each.grad is not None]
            return nn.utils.get_total_norm(sum(on_all(gradients), []))

        def plain(is_late):
            stage, before, norms = Stage(), None, []
            optimizer = torch.optim.AdamW(stage.model.parameters(), lr=1e-2, fused=True)
            for step in range(3):
                stage.run(step)
                norms.append(norm := total_norm(stage))
                used = norm if before is None or not is_late else before
                assert used > CLIP
                for each in stage.model.parameters():
                    each.grad.mul_(CLIP / (used + 1e-6))
                optimizer.step(), optimizer.zero_grad()
                before = norm
            return stage, norms

        for settings in ({}, {"gradient_memory": 0}, {"overlap": True, "accumulation": PARTS}):
            expected, norms = plain("overlap" in settings)
            stage = Stage()
            optimizer = FlashAdamW(
                stage.model.parameters(), lr=1e-2, flash=flash, tile=1024, clip_norm=CLIP,
                clip_group=dist.group.WORLD, **settings
            )
            for step, norm in enumerate(norms):
                stage.run(step)
                optimizer.step(), optimizer.zero_grad()
                found = optimizer._penstock.last_norm
                torch.testing.assert_close(found, norm)
                assert len(set(on_all(found.item()))) == 1
            for mine, other in zip(stage.model.parameters(), expected.model.parameters()):
                torch.testing.assert_close(mine, other)
            before = [each.detach().clone() for each in stage.model.parameters()]
            stage.run(3)
            if rank == 1:
                optimizer.zero_grad()
            if not optimizer._penstock.config.overlap:
                norm = total_norm(stage)
                optimizer.step()
                torch.testing.assert_close(optimizer._penstock.last_norm, norm)
            optimizer.close()

        # without the group each has its own
        stage = Stage()
        optimizer = FlashAdamW(stage.model.parameters(), flash=flash, tile=1024, clip_norm=CLIP)
        stage.run(0)
        optimizer.step()
        assert len(set(on_all(optimizer._penstock.last_norm.item()))) == 2
        optimizer.close()
        """,
    )


def test_a_schedule_that_divides_gradients_after_their_use_is_refused_with_what_to_do(disk_path):
    rank_programs.run(
        disk_path,
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        for settings in ({}, {"gradient_memory": 0}):
            model = nn.Linear(64, 64)
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
            schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
            optimizer = FlashAdamW(
                model.parameters(), flash=flash, tile=1024, overlap=True, accumulation=2, **settings
            )
            last = {"target": torch.zeros(4, 64)} if rank == world - 1 else {}
            try:
                schedule.step(*((torch.ones(4, 64),) if rank == 0 else ()), **last)
                optimizer.step()
                raise SystemExit("gradients that were divided after their use were taken")
            except ConfigError as error:
                assert "scale_grads=False" in str(error), error
            optimizer.close()
        """,
    )


def test_a_rank_that_skips_backward_joins_in_the_norm_of_those_that_update_in_it(disk_path):
    """Its pass begins in ``step``, and theirs has begun in backward: each rank asks for one norm."""
    rank_programs.run(
        disk_path,
        """
        CLIP = 0.05

        def trained(make, step_of):
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))
            optimizer = make(model.parameters())
            for step in range(4):
                skips = step == 2 and rank == 1
                if not skips:
                    random = torch.Generator().manual_seed(10 * step + rank)
                    model(torch.randn(8, 40, generator=random)).square().mean().backward()
                gradients = [each.grad + 0 for each in model.parameters() if each.grad is not None]
                assert len(gradients) == (0 if skips else 4)
                norm = nn.utils.get_total_norm(sum(on_all(gradients), []))
                step_of(optimizer, [] if skips else [*model.parameters()], norm, skips)
                optimizer.zero_grad()
            return model, optimizer

        norms = []

        def clipped(optimizer, parameters, norm, skips):
            norms.append(norm)
            used = norms[max(0, len(norms) - 2)]
            assert used > CLIP
            for each in parameters:
                each.grad.mul_(CLIP / (used + 1e-6))
            optimizer.step()

        def overlapped(optimizer, parameters, norm, skips):
            began = optimizer._penstock.overlap.is_under_way
            began_on.append(on_all(began))
            optimizer.step()
            found = optimizer._penstock.last_norm
            torch.testing.assert_close(found, norm)
            assert len(set(on_all(found.item()))) == 1

        began_on = []
        expected, _ = trained(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), clipped)
        model, optimizer = trained(
            lambda params: FlashAdamW(
                params, lr=1e-2, flash=flash, tile=1024, clip_norm=CLIP, clip_group=dist.group.WORLD,
                overlap=True,
            ),
            overlapped,
        )
        assert began_on == [[False, False], [True, True], [True, False], [True, True]]
        for mine, other in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(mine, other)
        optimizer.close()
        """,
    )


def test_stages_that_are_sharded_have_one_norm_by_the_group_with_one_rank_of_each(disk_path):
    """Without it the norm is that of the stage, over the ranks of its mesh."""
    rank_programs.run(
        disk_path,
        """
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = rank // 2
        model = nn.Sequential(nn.Linear(30, 40 + stage), nn.Linear(40 + stage, 7))
        fully_shard(model, mesh=mesh["dp"])
        for group in (mesh.get_group("pp"), None):
            optimizer = FlashAdamW(
                model.parameters(), flash=flash, tile=1024, clip_norm=0.01, clip_group=group
            )
            model(torch.randn(8, 30)).square().mean().backward()
            norm = nn.utils.get_total_norm([each.grad.full_tensor() for each in model.parameters()])
            by_stage = on_all(norm)[::2]
            wanted = nn.utils.get_total_norm(by_stage) if group is not None else by_stage[stage]
            optimizer.step(), optimizer.zero_grad()
            torch.testing.assert_close(optimizer._penstock.last_norm, wanted)
            optimizer.close()
        """,
        4,
    )


def test_a_group_that_makes_no_sense_is_refused(small):
    with pytest.raises(ConfigError, match="clip_group says over which ranks clip_norm"):
        FlashAdamW(parameters(), clip_group=object(), **small)
    with pytest.raises(ConfigError, match="must be a process group of torch"):
        FlashAdamW(parameters(), clip_norm=1.0, clip_group="pp", **small)
    not_in = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ConfigError, match="that this rank is in"):
        FlashAdamW(parameters(), clip_norm=1.0, clip_group=not_in, **small)
