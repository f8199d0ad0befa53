-- Control: a run's identity, leadership, desired state, the end, and the count of everything.
-- reads and writes: run, defining, tickets, headers, outstanding, order, replay:*, step:<s>, ledger

local SAMPLER = {is = 'a sampler', fits = function(text) return FIRST[text] end}
local REMOVER = {is = 'a remover', fits = function(text) return REMOVERS[text] end}

-- args: protocol version, config digest, data-set digest, steps, slots, sampler, remover, capacity, max uses, and the keys that
-- define the run ('' to keep none). Creates the run, or attaches to the same one. Returns 1 if created, 0 if it existed; rejects a different run under the name, and the remains of one. Desired state may already exist.
register('create', {
  'protocol', TEXT, 'configuration', TEXT, 'data set', TEXT, 'steps', NATURAL, 'slots', NATURAL, 'sampler', SAMPLER, 'remover', REMOVER,
  'capacity', POSITIVE, 'max uses', NATURAL, 'defining keys', TEXT,
}, function(prefix, args)
  local key = prefix .. ':run'
  local have = redis.call('HMGET', key, 'protocol', 'config', 'dataset')
  if have[1] then
    for i, what in ipairs({'protocol version', 'configuration', 'data set'}) do
      if have[i] ~= args[i] then
        return redis.error_reply('DIFFERENT ' .. what .. ' ' .. have[i] .. ', not ' .. args[i])
      end
    end
    return 0
  end
  local remains = redis.call('HEXISTS', key, 'created_ms') + redis.call('EXISTS', prefix .. ':tickets')
    + redis.call('EXISTS', prefix .. ':outstanding') + redis.call('EXISTS', prefix .. ':order')
    + redis.call('EXISTS', prefix .. ':replay:state')
  if remains > 0 then return redis.error_reply('REMAINS of a run that was not deleted completely') end
  redis.call('HSET', key, 'protocol', args[1], 'config', args[2], 'dataset', args[3], 'steps', args[4], 'slots', args[5],
    'slots_used', 0, 'cursor', 0, 'published_version', -1, 'prepared_step', -1, 'committed_step', -1,
    'checkpointed_step', -1, 'retired_step', -1, 'last_epoch', -1,
    'incarnation', math.floor(now_ms() / 1000), 'created_ms', now_ms())
  if args[10] ~= '' then redis.call('SET', prefix .. ':defining', args[10]) end
  redis.call('HSET', prefix .. ':replay:state', 'sampler', args[6], 'remover', args[7], 'capacity', args[8], 'max_uses', args[9])
  redis.call('XGROUP', 'CREATE', prefix .. ':tickets', 'generators', '0', 'MKSTREAM')
  redis.call('XGROUP', 'CREATE', prefix .. ':tickets:rollouts', 'environments', '0', 'MKSTREAM')
  redis.call('XGROUP', 'CREATE', prefix .. ':headers', 'dataprep', '0', 'MKSTREAM')
  notify(prefix, 'control')
  return 1
end)

-- args: token, number of steps. A resumed run may be given another number; if it had finished and has steps left, it continues,
-- even if it was ended early. A repeated call, however late, changes nothing: the run may have yet another number by then.
-- Returns 1 if the number changed, 0 if not or if there is no run.
register('set_steps', {'token', TEXT, 'steps', POSITIVE}, function(prefix, args)
  local key, steps, before = prefix .. ':run', args[2], answered(prefix, args[1])
  if before then return tonumber(before) end
  local have = redis.call('HMGET', key, 'steps', 'committed_step')
  if not have[1] then return 0 end
  local changed = have[1] ~= steps and 1 or 0
  record_answer(prefix, args[1], changed)
  if changed == 1 then
    redis.call('HSET', key, 'steps', steps)
    for _, kept in ipairs(tonumber(steps) > have[2] + 1 and {'', 'revived:'} or {}) do
      if redis.call('HDEL', key, kept .. 'finished') == 1 then redis.call('HDEL', key, kept .. 'stopping') end
    end
    notify(prefix, 'control')
  end
  return changed
end)

-- args: candidate, lease ms. Takes or renews the leadership of dataprep. Returns the fencing number, or 0 if another leads or the
-- run is being restored.
register('lead', {'candidate', TEXT, 'lease ms', NATURAL}, function(prefix, args)
  local key, now = prefix .. ':run', tick(prefix)
  local have = redis.call('HMGET', key, 'leader', 'leader_until_ms', 'leader_fence', 'restoring')
  local mine = have[1] == args[1]
  if have[4] then return 0 end
  if not mine and have[1] and tonumber(have[2]) > now then return 0 end
  redis.call('HSET', key, 'leader', args[1], 'leader_until_ms', now + tonumber(args[2]))
  if mine then return have[3] end
  return next_fences(prefix, 'leader_fence', 1)[1]
end)

-- args: candidate. Gives up the leadership at once.
register('step_down', {'candidate', TEXT}, function(prefix, args)
  if redis.call('HGET', prefix .. ':run', 'leader') ~= args[1] then return 0 end
  redis.call('HDEL', prefix .. ':run', 'leader', 'leader_until_ms')
  notify(prefix, 'control')
  return 1
end)

-- args: token. A trainer starts: calls of older trainers are rejected from now on. Returns the fencing number, and the same one
-- if the call is repeated, however late: a late repeat must not reject the trainer that came next.
register('attach_trainer', {'token', TEXT}, function(prefix, args)
  local given = answered(prefix, args[1])
  if given then return given end
  return record_answer(prefix, args[1], next_fences(prefix, 'trainer_fence', 1)[1])
end)

-- A requested restore revives a run that has ended or is to end. If it fails, the run is as it was before.
local function note_restore(prefix, field, value)
  local run = prefix .. ':run'
  if field == 'restore' and value ~= '' then
    redis.call('HDEL', run, 'restore_failed')
    for _, ended in ipairs({'finished', 'stopping'}) do
      local how = redis.call('HGET', run, ended)
      if how then
        redis.call('HDEL', run, ended)
        redis.call('HSET', run, 'revived:' .. ended, how)
      end
    end
  elseif field == 'restore_failed' and redis.call('HGET', run, 'restore') == string.match(value, '^%S+') then -- not a later request
    redis.call('HDEL', run, 'restore')
    for _, ended in ipairs({'finished', 'stopping'}) do
      local how = redis.call('HGET', run, 'revived:' .. ended)
      if how then redis.call('HSET', run, ended, how) end
      redis.call('HDEL', run, 'revived:' .. ended)
    end
  end
end

-- args: token, field (`paused:<role>`, `scale:generator`, `most:generator`, `followed:generator`, `object:generator`, `stopping`,
-- `finished`, …), value (requester and reason) or '' to clear, and optionally the fence of the trainer that calls. Desired state
-- outlives every pod. A run with a requested restore does not end. A repeated call, however late, changes nothing: somebody may
-- have resumed meanwhile.
register('desire', {'token', TEXT, 'field', TEXT, 'value', TEXT, MAYBE, 'fence', NATURAL}, function(prefix, args)
  local token, field, value = args[1], args[2], args[3]
  if answered(prefix, token) then return 1 end
  local refusal = args[4] and fenced(prefix, 'trainer_fence', args[4])
  if refusal then return refusal end
  if (field == 'finished' or field == 'stopping') and value ~= '' then
    local back = redis.call('HMGET', prefix .. ':run', 'restore', 'restoring')
    if back[1] or back[2] then
      return redis.error_reply('OUTOFORDER the run cannot end: it is being restored to step ' .. (back[1] or back[2]))
    end
  end
  if value == '' then
    redis.call('HDEL', prefix .. ':run', field)
  else
    redis.call('HSET', prefix .. ':run', field, value)
  end
  note_restore(prefix, field, value)
  record_answer(prefix, token, '1')
  notify(prefix, 'control')
  return 1
end)

-- args: token, the pause as `desire` sets it, entry of the last dead letter. Pauses dataprep because one prompt after another fails.
-- Whoever leads next does not count these failures again, so a pause without the letter would be repeated after it was ended.
register('pause_failing', {'token', TEXT, 'pause', TEXT, 'letter', TEXT}, function(prefix, args)
  if answered(prefix, args[1]) then return 1 end
  redis.call('HSET', prefix .. ':run', 'paused:dataprep', args[2], 'letter_paused', args[3])
  record_answer(prefix, args[1], '1')
  notify(prefix, 'control')
  return 1
end)

-- no args. Counts every ticket at the same instant. Returns {name, count, …}; the ledger's own fields follow as `ledger:<field>`.
register('audit', {}, function(prefix)
  local refusal = redis.call('HEXISTS', prefix .. ':run', 'restoring') == 1 and busy(prefix)
  if refusal then return refusal end
  local prepared = 0
  for step = number(prefix, 'committed_step') + 1, number(prefix, 'prepared_step') do
    prepared = prepared + #words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh'))
  end
  local result = {
    'tickets', redis.call('XLEN', prefix .. ':tickets') + redis.call('XLEN', prefix .. ':tickets:rollouts'),
    'headers', redis.call('XLEN', prefix .. ':headers'),
    'outstanding', redis.call('ZCARD', prefix .. ':outstanding'),
    'buffered', tonumber(redis.call('HGET', prefix .. ':replay:state', 'uses:0')) or 0,
    'prepared', prepared,
    'requeued', redis.call('ZCARD', prefix .. ':requeued'),
    'reissue', redis.call('ZCARD', prefix .. ':reissue'),
    'slots_used', number(prefix, 'slots_used'),
  }
  local unpublished = 0
  for step = math.max(number(prefix, 'published_version'), 0), number(prefix, 'prepared_step') do -- -1: nothing is published
    unpublished = unpublished + #words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh'))
  end
  result[#result + 1] = 'unpublished'
  result[#result + 1] = unpublished
  local ledger = redis.call('HGETALL', prefix .. ':ledger')
  for i = 1, #ledger, 2 do
    result[#result + 1] = 'ledger:' .. ledger[i]
    result[#result + 1] = tonumber(ledger[i + 1])
  end
  return result
end)
