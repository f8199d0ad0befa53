-- Steps: prepare, commit, publish, and retire what a checkpoint covers.
-- reads and writes: run, ledger, replay:*, departed, group:<group>, payload:<payload>
-- owns:             step:<s>        hash    plan; rank:<r>; groups; fresh (groups that train for the first time); departed
--                   trained:<epoch> bitmap  dataset rows that were trained

-- args: leader fence, step, max uses, stale groups, groups, plan, then the plan of each rank. Group lists are separated by spaces.
-- Returns 1 when prepared, now or by an earlier call with this very plan; refused unless `step` follows the last prepared one
-- and the groups are in the table. Stale groups leave, drawn ones are counted as used.
register('prepare', function(prefix, args)
  local refusal = fenced(prefix, 'leader_fence', args[1])
  if refusal then return refusal end
  local step, max_uses = tonumber(args[2]), tonumber(args[3])
  local key, prepared = prefix .. ':step:' .. step, number(prefix, 'prepared_step')
  if prepared == step and redis.call('HGET', key, 'plan') == args[6] then return 1 end
  if prepared ~= step - 1 then
    return redis.error_reply('OUTOFORDER step ' .. step .. ' does not follow prepared step ' .. prepared)
  end
  local stale, groups, fresh, seen = words(args[4]), words(args[5]), {}, {}
  for _, list in ipairs({stale, groups}) do
    for _, group in ipairs(list) do
      if seen[group] then return redis.error_reply('OUTOFORDER group ' .. group .. ' is drawn or dropped twice') end
      if not redis.call('ZSCORE', prefix .. ':replay:order', group) then
        return redis.error_reply('OUTOFORDER group ' .. group .. ' is not in the replay table')
      end
      seen[group] = true
    end
  end
  for _, group in ipairs(stale) do drop_group(prefix, group, 'stale') end
  local departed = redis.call('LRANGE', prefix .. ':departed', 0, -1)
  for _, group in ipairs(groups) do
    local uses = redis.call('HINCRBY', prefix .. ':group:' .. group, 'uses', 1)
    if uses == 1 then fresh[#fresh + 1] = group end
    if uses >= max_uses then
      leave_table(prefix, group)
      departed[#departed + 1] = group
    else
      redis.call('SADD', prefix .. ':replay:used', group)
    end
  end
  redis.call('HSET', key, 'plan', args[6], 'groups', args[5], 'fresh', table.concat(fresh, ' '), 'departed',
    table.concat(departed, ' '))
  for i = 7, #args do redis.call('HSET', key, 'rank:' .. (i - 7), args[i]) end
  redis.call('DEL', prefix .. ':departed')
  redis.call('HSET', prefix .. ':run', 'prepared_step', step)
  ring(prefix, 'steps')
  return 1
end)

-- args: trainer fence, step. Returns 1 when committed now, 0 when it was before: committing twice is harmless.
register('commit', function(prefix, args)
  local refusal = fenced(prefix, 'trainer_fence', args[1])
  if refusal then return refusal end
  local step, committed = tonumber(args[2]), number(prefix, 'committed_step')
  if step <= committed then return 0 end
  if step ~= committed + 1 or step > number(prefix, 'prepared_step') then
    return redis.error_reply('OUTOFORDER step ' .. step .. ' does not follow committed step ' .. committed)
  end
  local fresh = words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh'))
  for _, group in ipairs(fresh) do
    local epoch, index = string.match(group, '^(%d+)-(%d+)$')
    if redis.call('SETBIT', prefix .. ':trained:' .. epoch, index, 1) == 1 then count(prefix, 'doubled', 1) end
  end
  count(prefix, 'trained', #fresh)
  redis.call('HSET', prefix .. ':run', 'committed_step', step)
  ring(prefix, 'steps')
  return 1
end)

-- args: trainer fence, version. The fleet holds `version`: slots of the steps it contains are given back.
-- Returns 1 when published now, 0 when it was before.
register('publish', function(prefix, args)
  local refusal = fenced(prefix, 'trainer_fence', args[1])
  if refusal then return refusal end
  local version, published = tonumber(args[2]), number(prefix, 'published_version')
  if version <= published then return 0 end
  if version > number(prefix, 'committed_step') + 1 then
    return redis.error_reply('OUTOFORDER version ' .. version .. ' contains steps that are not committed')
  end
  for step = math.max(published, 0), version - 1 do
    free_slots(prefix, #words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh')))
  end
  redis.call('HSET', prefix .. ':run', 'published_version', version)
  count(prefix, 'syncs', 1)
  ring(prefix, 'version')
  return 1
end)

-- args: trainer fence, step. A checkpoint holds everything up to and including `step`.
register('checkpointed', function(prefix, args)
  local refusal = fenced(prefix, 'trainer_fence', args[1])
  if refusal then return refusal end
  redis.call('HSET', prefix .. ':run', 'checkpointed_step', args[2])
  return 1
end)

-- no args. Deletes the oldest plan that is covered by a checkpoint and published, with the groups that departed with it.
-- One step a call keeps the server responsive. Returns 1 when a step was retired, 0 when none is due.
register('retire', function(prefix)
  local step = number(prefix, 'retired_step') + 1
  if step > number(prefix, 'checkpointed_step') or step >= number(prefix, 'published_version') then return 0 end
  local key = prefix .. ':step:' .. step
  for _, group in ipairs(words(redis.call('HGET', key, 'departed'))) do delete_group(prefix, group) end
  redis.call('UNLINK', key)
  redis.call('HSET', prefix .. ':run', 'retired_step', step)
  return 1
end)
